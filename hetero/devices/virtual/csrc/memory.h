// Device memory, pinned host memory, and the CPU allocator that lets CPU kernels write into device memory.
//
// Owns: every block, the cap, the statistics. Invariant: bytes in use never exceed the cap, and memory
// outside a live block reads as 0xFF (NaN). A block's record lies in front of its bytes, so that finding it
// from a DataPtr of ours costs a compare; only raw addresses go through a map.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <array>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "races.h"
#include "segments.h"

namespace hetero {

inline const c10::Device kDevice{c10::DeviceType::PrivateUse1, 0};
void check_device_index(c10::DeviceIndex index);  // raises unless it is 0 or "the current one"

enum class Place : uint8_t { kDevice, kPinned, kRegistered };

struct Block {
  char* data;
  size_t nbytes;    // as rounded to 512 bytes
  size_t requested;
  size_t counted;
  Segments::Piece* piece = nullptr;  // while memory is in segments
  Place place;
  int stream = 0;   // the stream it was allocated on
  History history;
  uint64_t recorded_streams = 0;  // record_stream: bit per stream
  std::atomic<int> holds{1};      // the owner, and every pending copy
  Block(char* data, size_t nbytes, size_t requested, Place place)
      : data(data), nbytes(nbytes), requested(requested), counted(nbytes), place(place), history(nbytes) {}
};

c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();

Block* block_of(const c10::DataPtr& p);    // the block behind a DataPtr of ours, or null
Block* host_block_at(const void* address);  // the pinned or registered block that contains an address, or null
void hold(Block* b);
void release(Block* b);

void host_register(void* address, size_t nbytes);
void host_unregister(void* address);

size_t memory_limit();
void set_memory_limit(size_t nbytes);
std::pair<size_t, size_t> allocated_and_peak();
// Keep memory as CUDA's caching allocator does, or exactly; for blocks made from now on. The limit is then one on what
// segments take, and may lie below it.
void set_in_segments(bool on);
bool is_in_segments();
std::pair<size_t, size_t> reserved_and_peak();

// Bytes of somebody's block where an allocation of this very size may go instead.
struct Slot {
  char* data;
  size_t nbytes;
  Block* block;
  int passed_over;  // allocations of this size that are not meant, before the one that is
};
// Offer ranges (begin, bytes, passed over) of the block that begins at `owner` to this thread's next allocations of
// these sizes, each once, until withdraw_slots(), which tells the addresses of those that are taken and not given
// back yet.
void offer_slots(void* owner, const std::vector<std::array<size_t, 3>>& slots);
std::vector<size_t> withdraw_slots();

// While one of these lives, CPU tensors made by this thread lie in device memory and count there.
struct AllocateOnDevice {
  AllocateOnDevice();
  ~AllocateOnDevice();
};

// While one of these lives, they do not, whatever surrounds it.
struct AllocateOnHost {
  AllocateOnHost();
  ~AllocateOnHost();
  int before;
};

// While one of these lives, an allocation of this thread that the device has no memory for throws a Refusal: no
// std::exception, so that no kernel takes it for something that it can do without. Only around what runs no Python.
struct Refusal {
  std::string what;
};
struct RefuseForGood {
  RefuseForGood();
  ~RefuseForGood();
};
c10::Allocator* cpu_allocator();  // the one that AllocateOnDevice steers
void install_cpu_allocator();

}  // namespace hetero
