// Owns the bookkeeping of History; see races.h for the rules.
#include "races.h"

namespace hetero {

// The first segment that ends after `offset`. A slab of host memory has one for each tensor in it.
size_t History::first_after(size_t offset) const {
  return std::partition_point(segments_.begin(), segments_.end(),
                              [&](const Segment& s) { return s.end <= offset; }) - segments_.begin();
}

// Makes `offset` a segment boundary and returns the index of the segment that begins there.
size_t History::split_at(size_t offset) {
  size_t i = first_after(offset);
  if (i == segments_.size() || segments_[i].begin == offset) return i;
  Segment right = segments_[i];
  segments_[i].end = offset;
  right.begin = offset;
  segments_.insert(segments_.begin() + i + 1, std::move(right));
  return i + 1;
}

// Joins equal neighbours among the segments [first, last], so that the partition stays as coarse as it can.
void History::join(size_t first, size_t last) {
  size_t keep = first;
  last = std::min(last, segments_.size() - 1);
  for (size_t i = first + 1; i <= last; ++i) {
    if (segments_[keep].same_state(segments_[i])) {
      segments_[keep].end = segments_[i].end;
    } else if (++keep != i) {
      segments_[keep] = std::move(segments_[i]);
    }
  }
  if (keep < last) segments_.erase(segments_.begin() + keep + 1, segments_.begin() + last + 1);
}

std::optional<Epoch> History::record(Epoch now, const Clock& clock, const Clock& host, size_t begin, size_t end) {
  if (begin >= end) return std::nullopt;
  const bool write = now.kind != Access::kRead;
  if (auto conflict = unordered(clock, write, begin, end)) return conflict;
  const bool whole = begin <= segments_.front().begin && end >= segments_.back().end;
  const size_t first = whole ? 0 : split_at(begin);
  const size_t last = whole ? segments_.size() : split_at(end);  // half-open
  for (size_t i = first; i < last; ++i) {
    Segment& s = segments_[i];
    if (write) {
      s.reads.clear();
      s.write = now;
      continue;
    }
    // What the host has waited for precedes everything launched from now on: forget it.
    if (host.covers(s.write)) s.write = {};
    auto* kept = std::remove_if(s.reads.begin(), s.reads.end(),
                                [&](const Epoch& r) { return r.stream == now.stream || host.covers(r); });
    s.reads.erase(kept, s.reads.end());
    s.reads.push_back(now);
  }
  if (segments_.size() > 1) join(first > 0 ? first - 1 : 0, last);
  return std::nullopt;
}

std::optional<Epoch> History::unordered(const Clock& clock, bool write, size_t begin, size_t end) const {
  auto pending = [&](const Epoch& e) { return !clock.covers(e); };
  for (size_t i = first_after(begin); i < segments_.size() && segments_[i].begin < end; ++i) {
    const Segment& s = segments_[i];
    if (pending(s.write)) return s.write;
    if (!write) continue;
    for (const Epoch& r : s.reads)
      if (pending(r)) return r;
  }
  return std::nullopt;
}

}  // namespace hetero
