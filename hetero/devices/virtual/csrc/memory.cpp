// Owns blocks, cap and statistics; see memory.h for the rules.
#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/flat_hash_map.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#include "streams.h"

namespace hetero {
namespace {

constexpr size_t kRounding = 512;
constexpr int kPoison = 0xFF;  // NaN in every floating point format, -1 in every integer
constexpr size_t kHeader = kRounding;
static_assert(sizeof(Block) <= kHeader);

struct Count {
  size_t now = 0, peak = 0;
  void add(size_t n) { peak = std::max(peak, now += n); }
};

struct Pool {
  size_t limit = size_t{256} << 20;
  size_t allocated = 0, allocated_peak = 0, requested = 0, requested_peak = 0;
  int64_t blocks = 0, blocks_peak = 0, made = 0, freed = 0, out_of_memory = 0;
  size_t bytes_made = 0, bytes_freed = 0;
  bool in_segments = false;
  Segments segments;
  Count large, large_requested;  // of pieces that are not among small ones
  size_t apart = 0;  // allocated, in no segment
  size_t reserved() const { return segments.reserved() + apart; }
  size_t reserved_peak() const {
    return in_segments ? segments.reserved_peak() + apart : std::max(allocated_peak, reserved());
  }
  // Freed memory, poisoned, by size: spares the page faults of a fresh mmap. Together with the memory in use
  // it stays under the limit, and it is not counted.
  std::unordered_map<size_t, std::vector<char*>> cache;
  size_t cached = 0;
  // Freed under record_stream, still in use by those streams.
  std::vector<std::pair<Block*, std::shared_ptr<Ticket>>> leaving;
  std::map<const char*, Block*> host_blocks;
  ska::flat_hash_set<void*> live;  // the data of every device block that has not been freed
  // Slots that an allocation has taken: the bytes of a block that somebody else owns, and which is held meanwhile.
  std::unordered_map<void*, Block*> slots;
};

// Places, within blocks of their owner, for the next allocations of this thread; those that were taken.
thread_local std::vector<Slot> tls_offered;
thread_local std::vector<void*> tls_taken;

Pool& pool() {
  static Pool* p = new Pool;
  return *p;
}

Block* header_of(void* data) { return reinterpret_cast<Block*>(static_cast<char*>(data) - kHeader); }

// Memory for a block and its header; null if the host has none.
char* new_memory(size_t nbytes) {
  auto* base = static_cast<char*>(std::aligned_alloc(kRounding, kHeader + nbytes));
  return base ? base + kHeader : nullptr;
}

void free_memory(char* data) { std::free(data - kHeader); }

size_t rounded(size_t nbytes) { return (nbytes + kRounding - 1) / kRounding * kRounding; }

std::string human(size_t nbytes) {
  char text[32];
  if (nbytes < 1024) snprintf(text, sizeof text, "%zu B", nbytes);
  else if (nbytes < (1u << 20)) snprintf(text, sizeof text, "%.2f KiB", nbytes / 1024.0);
  else if (nbytes < (1u << 30)) snprintf(text, sizeof text, "%.2f MiB", nbytes / 1048576.0);
  else snprintf(text, sizeof text, "%.2f GiB", nbytes / 1073741824.0);
  return text;
}

void drop_cache_locked(Pool& p) {
  for (auto& [size, list] : p.cache)
    for (char* data : list) free_memory(data);
  p.cache.clear();
  p.cached = 0;
}

void uncount_locked(Pool& p, const Block& b) {
  p.allocated -= b.counted;
  p.requested -= b.requested;
  p.bytes_freed += b.counted;
  if (b.piece && !b.piece->pool.second) p.large.now -= b.counted, p.large_requested.now -= b.requested;
  b.piece ? p.segments.give_back(b.piece) : void(p.apart -= b.counted);
  ++p.freed;
  --p.blocks;
}

// Record_stream'd blocks stay in use until the recorded streams have passed the point of the free.
void collect_leaving_locked(Pool& p, std::vector<Block*>& gone) {
  auto keep = p.leaving.begin();
  for (auto& entry : p.leaving) {
    if (entry.second->finished()) {
      uncount_locked(p, *entry.first);
      gone.push_back(entry.first);
    } else {
      *keep++ = std::move(entry);
    }
  }
  p.leaving.erase(keep, p.leaving.end());
}

// A reading of the statistics must not see blocks whose streams have finished with them.
void collect_leaving() {
  std::vector<Block*> gone;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    if (pool().leaving.empty()) return;
    collect_leaving_locked(pool(), gone);
  }
  for (Block* b : gone) release(b);
}

std::shared_ptr<Ticket> ticket_for_streams(uint64_t streams) {
  auto all = std::make_shared<Ticket>();
  for (int id = 1; id < kMaxStreams; ++id) {
    if (!(streams >> id & 1)) continue;
    auto t = std::make_shared<Ticket>();
    stream(id).enqueue([t] { t->complete(); });
    all->after.push_back(std::move(t));
  }
  all->complete();
  return all;
}

std::string describe_block(const Block& b) {
  char text[96];
  snprintf(text, sizeof text, "the block at %p (%s)", static_cast<void*>(b.data), human(b.requested).c_str());
  return text;
}

void free_device(void* data) {
  Block* b = header_of(data);
  std::shared_ptr<Ticket> leaving;
  if (b->recorded_streams) leaving = ticket_for_streams(b->recorded_streams);
  {
    Stream& owner = stream(b->stream);
    std::lock_guard<std::mutex> lock(state_mutex());
    Pool& p = pool();
    p.live.erase(data);
    Clock clock = clock_now(owner);
    for (int id = 1; id < kMaxStreams; ++id)  // these have to pass as well before it is used again
      if (b->recorded_streams >> id & 1) clock.merge(clock_now(stream(id)));
    if (auto e = b->history.unordered(clock, true, 0, b->nbytes)) {
      report_race(describe_block(*b) + ", allocated on stream " + std::to_string(b->stream) + ", was freed while " +
                      describe(*e) + " it, and no wait orders the free after that: make stream " +
                      std::to_string(b->stream) + " wait for an event recorded after the copy before dropping the "
                      "last reference",
                  true);
    }
    if (leaving) {
      p.leaving.emplace_back(b, std::move(leaving));
      return;
    }
    uncount_locked(p, *b);
  }
  release(b);
}

void free_slot(void* data) {
  Block* b;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    auto it = pool().slots.find(data);
    b = it->second;
    pool().slots.erase(it);
  }
  release(b);
}

// The offered slot of this very size, poisoned; null if there is none.
void* take_slot(size_t nbytes) {
  for (auto it = tls_offered.begin(); it != tls_offered.end(); ++it) {
    if (it->nbytes != nbytes || it->passed_over-- > 0) continue;
    void* data = it->data;
    std::memset(data, kPoison, nbytes);
    hold(it->block);
    {
      std::lock_guard<std::mutex> lock(state_mutex());
      pool().slots[data] = it->block;
    }
    tls_offered.erase(it);
    tls_taken.push_back(data);
    return data;
  }
  return nullptr;
}

thread_local int tls_refuse_for_good = 0;

[[noreturn]] void refuse(std::string what) {
  if (tls_refuse_for_good) throw Refusal{std::move(what)};
  TORCH_CHECK_WITH(OutOfMemoryError, false, what);
}

struct DeviceAllocatorImpl final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_device, kDevice};
    if (!tls_offered.empty()) {
      if (void* data = take_slot(nbytes)) return {data, data, &free_slot, kDevice};
    }
    const size_t size = rounded(nbytes);
    Stream& owner = stream(hetero::current_stream());
    collect_leaving();
    char* data = nullptr;
    size_t counted = size;
    Segments::Piece* piece = nullptr;
    {
      std::lock_guard<std::mutex> lock(state_mutex());
      Pool& p = pool();
      const size_t most = p.limit - std::min(p.limit, p.apart);
      if (p.in_segments) piece = p.segments.take(size, owner.id, most);
      if (p.in_segments ? !piece : p.allocated + size > p.limit) {
        ++p.out_of_memory;
        refuse(c10::str("virtual accelerator out of memory: tried to allocate ", human(size), ", ", human(p.allocated),
                        " in use of ", human(p.limit), " (", human(p.limit - std::min(p.limit, p.allocated)),
                        " free)"));
      }
      if (piece) counted = piece->nbytes;
      else p.apart += size;
      p.allocated += counted;
      p.allocated_peak = std::max(p.allocated_peak, p.allocated);
      p.requested += nbytes;
      p.requested_peak = std::max(p.requested_peak, p.requested);
      p.bytes_made += counted;
      if (piece && !piece->pool.second) p.large.add(counted), p.large_requested.add(nbytes);
      ++p.made;
      p.blocks_peak = std::max(p.blocks_peak, ++p.blocks);
      auto it = p.cache.find(size);
      if (it != p.cache.end() && !it->second.empty()) {
        data = it->second.back();
        it->second.pop_back();
        p.cached -= size;
      } else if (p.allocated + p.cached > p.limit) {
        drop_cache_locked(p);
      }
    }
    if (!data) {
      data = new_memory(size);
      if (!data) {
        std::lock_guard<std::mutex> lock(state_mutex());
        Pool& p = pool();
        p.allocated -= counted, p.requested -= nbytes, --p.blocks;
        if (piece && !piece->pool.second) p.large.now -= counted, p.large_requested.now -= nbytes;
        piece ? p.segments.give_back(piece) : void(p.apart -= size);
        refuse(c10::str("virtual accelerator: the host has no ", human(size), " to lend"));
      }
      std::memset(data, kPoison, size);
    }
    auto* b = new (header_of(data)) Block(data, size, nbytes, Place::kDevice);
    b->stream = owner.id;
    b->counted = counted;
    b->piece = piece;
    {
      // A block may be used by other streams only after they have waited for the stream it was allocated on.
      std::lock_guard<std::mutex> lock(state_mutex());
      b->history.record(owner.epoch(Access::kAllocate), clock_now(owner), host_clock(), 0, size);
      pool().live.insert(data);
    }
    return {data, data, &free_device, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    collect_leaving();
    std::lock_guard<std::mutex> lock(state_mutex());
    pool().segments.drop_unused();
    drop_cache_locked(pool());
  }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    Block* b = block_of(p);
    if (!b || b->stream == s.id() || s.id() == 0) return;
    std::lock_guard<std::mutex> lock(state_mutex());
    b->recorded_streams |= uint64_t{1} << s.id();
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    collect_leaving();
    std::lock_guard<std::mutex> lock(state_mutex());
    const Pool& p = pool();
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto fill = [](c10::CachingDeviceAllocator::StatArray& a, int64_t now, int64_t peak, int64_t in, int64_t out) {
      a[0].current = now, a[0].peak = peak, a[0].allocated = in, a[0].freed = out;
    };
    for (auto* a : {&stats.allocated_bytes, &stats.active_bytes})
      fill(*a, p.allocated, p.allocated_peak, p.bytes_made, p.bytes_freed);
    fill(stats.reserved_bytes, p.reserved(), p.reserved_peak(), 0, 0);
    fill(stats.requested_bytes, p.requested, p.requested_peak, 0, 0);
    constexpr auto kLarge = static_cast<size_t>(c10::CachingAllocator::StatType::LARGE_POOL);
    stats.allocated_bytes[kLarge].current = p.large.now, stats.allocated_bytes[kLarge].peak = p.large.peak;
    stats.requested_bytes[kLarge].current = p.large_requested.now;
    stats.requested_bytes[kLarge].peak = p.large_requested.peak;
    for (auto* a : {&stats.allocation, &stats.active, &stats.segment})
      fill(*a, p.blocks, p.blocks_peak, p.made, p.freed);
    stats.num_ooms = p.out_of_memory;
    stats.num_device_alloc = p.made;
    stats.num_device_free = p.freed;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(state_mutex());
    Pool& p = pool();
    p.made = p.freed = p.out_of_memory = 0;
    p.bytes_made = p.bytes_freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    collect_leaving();
    std::lock_guard<std::mutex> lock(state_mutex());
    Pool& p = pool();
    p.allocated_peak = p.allocated, p.requested_peak = p.requested, p.blocks_peak = p.blocks;
    p.large.peak = p.large.now, p.large_requested.peak = p.large_requested.now;
    p.segments.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    collect_leaving();
    std::lock_guard<std::mutex> lock(state_mutex());
    const Pool& p = pool();
    return {p.limit - std::min(p.limit, p.reserved()), p.limit};
  }
};

// As torch's own pinned allocator, it keeps memory that a pending copy still uses: such a free is not a race.
void free_pinned(void* data) {
  Block* b = header_of(data);
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    pool().host_blocks.erase(b->data);
  }
  release(b);
}

struct PinnedAllocatorImpl final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    const size_t size = std::max(rounded(nbytes), kRounding);
    char* data = new_memory(size);
    TORCH_CHECK(data, "virtual accelerator: no ", human(size), " of host memory to pin");
    auto* b = new (header_of(data)) Block(data, size, nbytes, Place::kPinned);
    std::lock_guard<std::mutex> lock(state_mutex());
    pool().host_blocks[data] = b;
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

thread_local int tls_on_device = 0;

c10::Allocator* plain_cpu_allocator = nullptr;

// What libraries free by bare address may have been allocated in either state.
void free_raw(void* data) {
  bool ours, slot;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    ours = pool().live.count(data) > 0;
    slot = pool().slots.count(data) > 0;
  }
  if (slot) free_slot(data);
  else ours ? free_device(data) : plain_cpu_allocator->raw_deleter()(data);
}

struct SteeredCpuAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    // A kernel's few bytes, such as a Python number made into a tensor, travel with a launch: no device
    // memory.
    if (tls_on_device == 0 || nbytes <= 16) return plain_cpu_allocator->allocate(nbytes);
    at::DataPtr p = device_allocator().allocate(nbytes);
    p.unsafe_set_device(c10::Device(c10::DeviceType::CPU));
    return p;
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_raw; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

SteeredCpuAllocator* steered = nullptr;

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* a = new DeviceAllocatorImpl;
  return *a;
}

c10::Allocator& pinned_allocator() {
  static auto* a = new PinnedAllocatorImpl;
  return *a;
}

Block* block_of(const c10::DataPtr& p) {
  auto deleter = p.get_deleter();
  if (p.get_context() && deleter == &free_slot) {
    std::lock_guard<std::mutex> lock(state_mutex());
    auto it = pool().slots.find(p.get_context());
    return it == pool().slots.end() ? nullptr : it->second;
  }
  const bool ours = p.get_context() && (deleter == &free_device || deleter == &free_pinned);
  return ours ? header_of(p.get_context()) : nullptr;
}

void offer_slots(void* owner, const std::vector<std::array<size_t, 3>>& slots) {
  tls_offered.clear();
  tls_taken.clear();
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    TORCH_CHECK_VALUE(pool().live.count(owner), "offer_slots: no device block begins at ", owner);
  }
  Block* b = header_of(owner);
  for (auto [begin, nbytes, passed_over] : slots) {
    TORCH_CHECK_VALUE(nbytes > 0 && begin + nbytes <= b->nbytes, "offer_slots: bytes [", begin, ", ", begin + nbytes,
                      ") are not within the block of ", b->nbytes);
    tls_offered.push_back({b->data + begin, nbytes, b, static_cast<int>(passed_over)});
  }
}

std::vector<size_t> withdraw_slots() {
  std::vector<size_t> taken;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    for (void* data : tls_taken)
      if (pool().slots.count(data)) taken.push_back(reinterpret_cast<size_t>(data));
  }
  tls_offered.clear();
  tls_taken.clear();
  return taken;
}

Block* host_block_at(const void* address) {
  auto* a = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(state_mutex());
  auto& blocks = pool().host_blocks;
  auto it = blocks.upper_bound(a);
  if (it == blocks.begin()) return nullptr;
  Block* b = std::prev(it)->second;
  return a < b->data + b->nbytes ? b : nullptr;
}

void hold(Block* b) { b->holds.fetch_add(1, std::memory_order_relaxed); }

void release(Block* b) {
  if (b->holds.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const Place place = b->place;
  char* data = b->data;
  const size_t nbytes = b->nbytes;
  if (place == Place::kRegistered) {
    delete b;
    return;
  }
  b->~Block();
  if (place == Place::kDevice) {
    std::memset(data, kPoison, nbytes);
    std::lock_guard<std::mutex> lock(state_mutex());
    Pool& p = pool();
    if (p.allocated + p.cached + nbytes <= p.limit) {
      p.cache[nbytes].push_back(data);
      p.cached += nbytes;
      return;
    }
  }
  free_memory(data);
}

void host_register(void* address, size_t nbytes) {
  TORCH_CHECK_VALUE(nbytes > 0, "host_register: nbytes must be positive");
  auto* begin = static_cast<char*>(address);
  std::lock_guard<std::mutex> lock(state_mutex());
  auto& blocks = pool().host_blocks;
  auto next = blocks.lower_bound(begin);
  bool clash = next != blocks.end() && next->first < begin + nbytes;
  if (next != blocks.begin()) {
    Block* before = std::prev(next)->second;
    clash = clash || begin < before->data + before->nbytes;
  }
  TORCH_CHECK_VALUE(!clash, "host_register: part of the ", nbytes, " bytes at ", address, " is already pinned");
  blocks[begin] = new Block(begin, nbytes, nbytes, Place::kRegistered);
}

void host_unregister(void* address) {
  Block* b = nullptr;
  std::string race;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    auto& blocks = pool().host_blocks;
    auto it = blocks.find(static_cast<char*>(address));
    TORCH_CHECK_VALUE(it != blocks.end() && it->second->place == Place::kRegistered, "host_unregister: ", address,
                      " was never registered");
    b = it->second;
    if (auto e = b->history.unordered(host_clock(), true, 0, b->nbytes)) {
      race = describe_block(*b) + " was unregistered while " + describe(*e) +
             " it, and the host has not waited for that: synchronize an event recorded after the copy first";
      report_race(race, false);
    } else {
      blocks.erase(it);
    }
  }
  if (!race.empty()) raise_race(race);
  release(b);
}

size_t memory_limit() {
  std::lock_guard<std::mutex> lock(state_mutex());
  return pool().limit;
}

void set_memory_limit(size_t nbytes) {
  collect_leaving();
  std::lock_guard<std::mutex> lock(state_mutex());
  Pool& p = pool();
  TORCH_CHECK_VALUE(p.in_segments || nbytes >= p.allocated, "the limit of ", human(nbytes), " is below the ",
                    human(p.allocated), " that are allocated: free tensors first");
  p.limit = nbytes;
  if (p.allocated + p.cached > p.limit) drop_cache_locked(p);
}

std::pair<size_t, size_t> allocated_and_peak() {
  collect_leaving();
  std::lock_guard<std::mutex> lock(state_mutex());
  return {pool().allocated, pool().allocated_peak};
}

void set_in_segments(bool on) {
  collect_leaving();
  std::lock_guard<std::mutex> lock(state_mutex());
  Pool& p = pool();
  TORCH_CHECK_VALUE(on || p.allocated <= p.limit, human(p.allocated), " are allocated, above the limit of ",
                    human(p.limit));
  p.segments.drop_unused();
  p.in_segments = on;
}

bool is_in_segments() {
  std::lock_guard<std::mutex> lock(state_mutex());
  return pool().in_segments;
}

std::pair<size_t, size_t> reserved_and_peak() {
  collect_leaving();
  std::lock_guard<std::mutex> lock(state_mutex());
  return {pool().reserved(), pool().reserved_peak()};
}

AllocateOnDevice::AllocateOnDevice() { ++tls_on_device; }
AllocateOnDevice::~AllocateOnDevice() { --tls_on_device; }

AllocateOnHost::AllocateOnHost() : before(std::exchange(tls_on_device, 0)) {}
AllocateOnHost::~AllocateOnHost() { tls_on_device = before; }

RefuseForGood::RefuseForGood() { ++tls_refuse_for_good; }
RefuseForGood::~RefuseForGood() { --tls_refuse_for_good; }

c10::Allocator* cpu_allocator() { return steered; }

void install_cpu_allocator() {
  plain_cpu_allocator = c10::GetCPUAllocator();
  steered = new SteeredCpuAllocator;
  c10::SetCPUAllocator(steered);
}

}  // namespace hetero
