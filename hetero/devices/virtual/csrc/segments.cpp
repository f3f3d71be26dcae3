// See segments.h.
#include "segments.h"

#include <algorithm>

namespace hetero {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kLeastPiece = 512;
constexpr size_t kSmall = kMiB;            // requests up to it lie in segments of kSmallSegment
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kLargeSegment = 20 * kMiB;  // for requests below kOwnSegment; others have one of their own
constexpr size_t kOwnSegment = 10 * kMiB;
constexpr size_t kOwnRounding = 2 * kMiB;

size_t segment_bytes(size_t nbytes) {
  if (nbytes <= kSmall) return kSmallSegment;
  if (nbytes < kOwnSegment) return kLargeSegment;
  return (nbytes + kOwnRounding - 1) / kOwnRounding * kOwnRounding;
}

}  // namespace

Segments::Piece* Segments::take(size_t nbytes, int stream, size_t most) {
  const std::pair<int, bool> pool{stream, nbytes <= kSmall};
  Piece key{0, nbytes, pool};
  auto& pieces = free_[pool];
  Piece* piece = nullptr;
  auto it = pieces.lower_bound(&key);
  if (it != pieces.end()) {
    piece = *it;
    pieces.erase(it);
  } else if (!(piece = new_segment(nbytes, pool, most))) {
    drop_unused();
    piece = new_segment(nbytes, pool, most);
  }
  if (!piece) return nullptr;
  piece->free = false;
  const size_t rest = piece->nbytes - nbytes;
  if (pool.second ? rest >= kLeastPiece : rest > kSmall) {
    auto* left = new Piece{piece->address + nbytes, rest, pool, piece, piece->behind};
    if (left->behind) left->behind->before = left;
    piece->behind = left;
    piece->nbytes = nbytes;
    pieces.insert(left);
  }
  return piece;
}

void Segments::give_back(Piece* piece) {
  auto& pieces = free_[piece->pool];
  piece->free = true;
  if (piece->before && piece->before->free) {
    pieces.erase(piece->before);
    piece = merged(piece->before, piece);
  }
  if (piece->behind && piece->behind->free) {
    pieces.erase(piece->behind);
    piece = merged(piece, piece->behind);
  }
  pieces.insert(piece);
}

void Segments::drop_unused() {
  for (auto& [pool, pieces] : free_) {
    for (auto it = pieces.begin(); it != pieces.end();) {
      Piece* piece = *it;
      if (piece->before || piece->behind) {
        ++it;
        continue;
      }
      reserved_ -= piece->nbytes;
      it = pieces.erase(it);
      delete piece;
    }
  }
}

Segments::Piece* Segments::new_segment(size_t nbytes, std::pair<int, bool> pool, size_t most) {
  const size_t size = segment_bytes(nbytes);
  if (reserved_ + size > most) return nullptr;
  reserved_ += size;
  reserved_peak_ = std::max(reserved_peak_, reserved_);
  auto* piece = new Piece{next_address_, size, pool};
  next_address_ += size + kLargeSegment;
  return piece;
}

Segments::Piece* Segments::merged(Piece* a, Piece* b) {
  a->nbytes += b->nbytes;
  a->behind = b->behind;
  if (a->behind) a->behind->before = a;
  delete b;
  return a;
}

}  // namespace hetero
