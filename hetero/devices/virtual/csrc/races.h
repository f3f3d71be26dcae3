// The happens-before detector: vector clocks, and the history of accesses to one block of memory.
//
// Owns: what "ordered" means. A stream's clock says, for every stream, up to which time that stream's work is
// known to be finished before anything launched now. An access at (stream, time) is ordered before a later
// one if the later stream's clock has reached that time. Times advance only when a stream's clock is
// published (event record, synchronize), so that an operator costs one comparison a block and no counter.
//
// A block's history is a partition of its bytes into segments, each with its last write and the reads since,
// so that slabs whose parts are used by different streams raise no false alarm. A strided access counts as
// its hull.
#pragma once
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace hetero {

// Stream 0 is the default stream; the others come from a pool and are reused, as on CUDA.
constexpr int kMaxStreams = 33;

enum class Access : uint8_t { kRead, kWrite, kAllocate, kFree };

// One access by one stream; time 0 means "never".
struct Epoch {
  uint64_t time = 0;
  int16_t stream = 0;
  Access kind = Access::kRead;
  bool operator==(const Epoch& o) const { return time == o.time && stream == o.stream && kind == o.kind; }
};

struct Clock {
  std::array<uint64_t, kMaxStreams> reached{};
  void merge(const Clock& o) {
    for (int i = 0; i < kMaxStreams; ++i) reached[i] = std::max(reached[i], o.reached[i]);
  }
  bool covers(const Epoch& e) const { return reached[e.stream] >= e.time; }
};

class History {
 public:
  explicit History(size_t nbytes) { segments_.push_back({0, nbytes, {}, {}}); }

  // Records an access to the bytes [begin, end) by `now.stream` whose clock is `clock`, or, if an earlier
  // access conflicts and no wait orders it before this one, records nothing and returns that one.
  std::optional<Epoch> record(Epoch now, const Clock& clock, const Clock& host, size_t begin, size_t end);

  // The first access to [begin, end) that conflicts with a read or write and that `clock` does not cover.
  std::optional<Epoch> unordered(const Clock& clock, bool write, size_t begin, size_t end) const;

 private:
  struct Segment {
    size_t begin, end;
    Epoch write;
    c10::SmallVector<Epoch, 2> reads;
    bool same_state(const Segment& o) const { return write == o.write && reads == o.reads; }
  };
  size_t first_after(size_t offset) const;
  size_t split_at(size_t offset);
  void join(size_t first, size_t last);
  c10::SmallVector<Segment, 1> segments_;
};

}  // namespace hetero
