// The operators that are the device's own: making tensors, views, copies, reading a number, resizing.
//
// Owns: the rule of what a copy is. Between pinned memory and the device, contiguous, of one type,
// non_blocking and on a side stream: asynchronous, by that stream's thread. Anything else between host and
// device: on the calling thread, taking as long as the link needs. Only blocking copies order the host after
// the stream.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <thread>

#include "fallback.h"
#include "tensors.h"

namespace hetero {

namespace {

using at::Tensor;
using c10::IntArrayRef;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_device_index(device ? device->index() : 0);
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  check_device_index(device ? device->index() : 0);
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

void copy_async(Stream& s, const Tensor& from, const Tensor& to, const Use& source, const Use& target) {
  hold(source.block);
  hold(target.block);
  const auto direction = on_device(to) ? Direction::kToDevice : Direction::kToHost;
  const size_t nbytes = target.end - target.begin;
  const TimePoint called = std::chrono::steady_clock::now();
  s.enqueue([=, &s, from_block = source.block, to_block = target.block, from_at = source.block->data + source.begin,
             to_at = target.block->data + target.begin] {
    const TimePoint arrival = book_transfer(direction, nbytes, std::max(called, s.reached));
    // The bytes move as late as can be, so that a missing wait shows as NaN and an early overwrite as
    // garbage.
    const auto moving = std::chrono::nanoseconds(nbytes / 8);
    std::this_thread::sleep_until(arrival - moving);
    std::memcpy(to_at, from_at, nbytes);
    std::this_thread::sleep_until(arrival);
    s.reached = arrival;
    release(from_block);
    release(to_block);
  });
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  Stream& s = stream(current_stream());
  const bool over_link = on_device(from) != on_device(to);
  const Use source = use_of(from, false), target = use_of(to, true);
  record_uses(s, {source, target});
  const bool pinned = source.block && target.block;
  if (non_blocking && over_link && pinned && s.id != 0 && from.dtype() == to.dtype() && from.is_contiguous() &&
      to.is_contiguous() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() &&
      from.sizes() == to.sizes()) {
    copy_async(s, from, to, source, target);
    return to;
  }
  InlineWork inline_work(s);
  TimePoint arrival{};
  if (over_link)
    arrival = book_transfer(on_device(to) ? Direction::kToDevice : Direction::kToHost, to.numel() * to.itemsize());
  (on_device(to) ? alias_on_cpu(to) : to).copy_(on_device(from) ? alias_on_cpu(from) : from);
  if (over_link) {
    sleep_until(arrival);
    if (!non_blocking) {
      std::lock_guard<std::mutex> state(state_mutex());
      host_joins(s);
    }
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// A tensor that is brought to the host lies there, even where a kernel that allocates on the device is in progress: who
// makes room when such a kernel finds none sends tensors home from within it.
Tensor to_copy(const Tensor& t, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
               std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
               std::optional<at::MemoryFormat> format) {
  AllocateOnHost on_host;
  return at::native::_to_copy(t, dtype, layout, device, pin_memory, non_blocking, format);
}

at::Scalar local_scalar_dense(const Tensor& t) {
  Stream& s = stream(current_stream());
  record_uses(s, {use_of(t, false)});
  InlineWork inline_work(s);
  sleep_until(book_transfer(Direction::kToHost, t.itemsize()));
  at::Scalar value = at::native::_local_scalar_dense_cpu(alias_on_cpu(t));
  std::lock_guard<std::mutex> state(state_mutex());
  host_joins(s);
  return value;
}

const Tensor& resize_(const Tensor& t, c10::SymIntArrayRef sym_size, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sym_size);
  auto* impl = t.unsafeGetTensorImpl();
  if (impl->sizes() != size) {
    impl->set_sizes_contiguous(size);
    const size_t need = impl->numel() ? (impl->storage_offset() + impl->numel()) * impl->itemsize() : 0;
    if (t.storage().nbytes() < need) resize_storage(t.storage().unsafeGetStorageImpl(), need);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return t;
}

Tensor as_strided(const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}

Tensor view(const Tensor& t, IntArrayRef size) { return at::native::view(t, size); }

Tensor reshape_alias(const Tensor& t, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}

Tensor& set_storage_at(Tensor& t, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(storage), offset, size, stride);
}

Tensor& set_storage(Tensor& t, at::Storage storage) {
  const int64_t items = static_cast<int64_t>(storage.nbytes() / t.itemsize());
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {items}, {});
}

Tensor& set_nothing(Tensor& t) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(), true);
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {0}, {});
}

Tensor& set_tensor(Tensor& t, const Tensor& source) { return at::native::set_tensor_(t, source); }

void record_stream(Tensor& t, c10::Stream s) { device_allocator().recordStream(t.storage().data_ptr(), s); }

// Lets `p.data = other` and Module.to change between CPU and device in place, as they do for CUDA, so that
// parameters keep their identity and their ties.
bool has_compatible_shallow_copy_type(const Tensor& a, const Tensor& b) {
  auto dense = [](const Tensor& t) { return t.layout() == c10::kStrided && (t.device().is_cpu() || on_device(t)); };
  return (dense(a) && dense(b)) || a.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(b.key_set());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_to_copy", &to_copy);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  // On the CPU these choose a kernel by the device's name: let them see CPU tensors.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
  register_cpu_kernels(m);
}

// Our copy reads conjugate and negative views itself; the default would resolve them by a copy, and so recur
// for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

}  // namespace hetero
