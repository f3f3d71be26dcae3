// Where PyTorch's CUDA caching allocator would put each block: segments, pieces of them, rounding.
//
// Owns: numbers only; no memory. Invariant: the pieces of a segment follow each other without gaps, and no two free
// ones are neighbours. Not thread-safe: used with the state mutex held.
//
// Source: c10/cuda/CUDACachingAllocator.cpp (malloc, should_split, get_allocation_size, release_cached_blocks), at
// its default settings.
#pragma once
#include <cstddef>
#include <map>
#include <set>
#include <utility>

namespace hetero {

class Segments {
 public:
  struct Piece {
    size_t address, nbytes;
    std::pair<int, bool> pool;  // the stream it was allocated on, and whether it lies among small ones
    Piece* before = nullptr;
    Piece* behind = nullptr;
    bool free = true;
  };

  // A piece for `nbytes` (a multiple of 512), perhaps larger than that; null if `most` bytes of segments do not do.
  Piece* take(size_t nbytes, int stream, size_t most);
  void give_back(Piece* piece);
  void drop_unused();  // segments of which no piece is in use
  size_t reserved() const { return reserved_; }
  size_t reserved_peak() const { return reserved_peak_; }
  void reset_peak() { reserved_peak_ = reserved_; }

 private:
  struct Smaller {
    bool operator()(const Piece* a, const Piece* b) const {
      return a->nbytes != b->nbytes ? a->nbytes < b->nbytes : a->address < b->address;
    }
  };
  using FreePieces = std::set<Piece*, Smaller>;
  Piece* new_segment(size_t nbytes, std::pair<int, bool> pool, size_t most);
  Piece* merged(Piece* a, Piece* b);
  std::map<std::pair<int, bool>, FreePieces> free_;
  size_t reserved_ = 0, reserved_peak_ = 0, next_address_ = 0;
};

}  // namespace hetero
