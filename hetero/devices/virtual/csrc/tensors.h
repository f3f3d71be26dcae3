// Between device tensors and the CPU tensors that alias them.
//
// Owns: how a device tensor is shown to a CPU kernel (same bytes, CPU keys) and how what the kernel made
// comes back, without copying either way; and which bytes of which block an operator touches.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "memory.h"
#include "streams.h"

namespace hetero {

// One use of a tensor's bytes by an operator or copy.
struct Use {
  Block* block;
  size_t begin, end;  // bytes within the block
  bool write;
  const at::Tensor* tensor;
};

inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1; }

// The use of t's bytes; its block is null if t is empty or lies in memory that is not watched. Raises if t is
// a device tensor whose storage was freed or is too small for it.
Use use_of(const at::Tensor& t, bool write);

// Records the uses as work launched now on s. Raises StreamRaceError at the first that no wait orders.
void record_uses(Stream& s, c10::ArrayRef<Use> uses);
std::string describe(const at::Tensor& t);

// A CPU tensor over the bytes of a device tensor (strided), valid while the device tensor's storage lives.
at::Tensor alias_on_cpu(const at::Tensor& t);

// The memory behind a CPU storage, as device memory: handed over if it was allocated under AllocateOnDevice,
// else copied.
at::DataPtr take_memory(c10::StorageImpl* cpu);

// A device tensor with the memory of a CPU tensor, as take_memory has it.
at::Tensor adopt(const at::Tensor& cpu);

// A tensor on `storage` with the geometry and type of `like`.
at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);

// Likewise on the storage of the device tensor `base`: for inference if that is, whatever mode the caller is in.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like);

// Work of s done by the calling thread, with CPU kernels: in stream order, after what is queued, allocating
// on the device.
struct InlineWork {
  explicit InlineWork(Stream& s);
  std::lock_guard<std::recursive_mutex> exclusive;
  AllocateOnDevice on_device;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast;
};

void resize_storage(c10::StorageImpl* storage, size_t nbytes);

at::Generator cpu_generator(const at::Generator& g);

}  // namespace hetero
