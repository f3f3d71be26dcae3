// Kernels of the host for the operators of a CUDA device whose memory is the host's.
//
// Every operator of ATen that has a kernel for CUDA gets one that waits for the current stream, shows its operands to the
// host's kernel as tensors of the host over the same bytes, and makes CUDA tensors of what comes out. Meanwhile the
// host's allocator is CUDA's: so results are handed over without a copy, and results and temporaries count, and are
// refused, by CUDA's own caching allocator. What allocates, copies between host and device or makes views stays torch's.
#include <ATen/Context.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::DispatchKey;

c10::Allocator* cuda_allocator() { return c10::cuda::CUDACachingAllocator::get(); }

bool on_cuda(const Tensor& t) { return t.defined() && t.is_cuda(); }

// --- allocating on the device within kernels of the host ---

thread_local bool tls_on_device = false;

struct OnDevice {
  bool before = std::exchange(tls_on_device, true);
  ~OnDevice() { tls_on_device = before; }
};

// An out-of-memory error on its way through a kernel of the host. It is no std::exception, because oneDNN's callers catch
// those, and compute otherwise from then on.
struct Refusal {
  std::exception_ptr error;
};

c10::Allocator* plain;

void free_any(void* data) {
  cudaPointerAttributes a;
  cudaPointerGetAttributes(&a, data);
  (a.type == cudaMemoryTypeDevice ? cuda_allocator() : plain)->raw_deleter()(data);
}

struct SteeredAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    // A Python number made into a tensor travels with a launch, and is no memory of the device.
    if (!tls_on_device || nbytes <= 16) return plain->allocate(nbytes);
    try {
      at::DataPtr p = cuda_allocator()->allocate(nbytes);
      p.unsafe_set_device(at::kCPU);
      return p;
    } catch (const c10::OutOfMemoryError&) {
      throw Refusal{std::current_exception()};
    }
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

// --- tensors of both kinds over the same memory ---

Tensor tensor_on(c10::Storage storage, DispatchKey key, const Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  return t;
}

c10::Storage storage_of(at::DataPtr p, size_t nbytes, c10::Allocator* allocator) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, std::move(p), allocator, true);
}

Tensor shown(const Tensor& t) {
  at::DataPtr p(t.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(), at::kCPU);
  return tensor_on(storage_of(std::move(p), t.storage().nbytes(), c10::GetCPUAllocator()), DispatchKey::CPU, t);
}

// The memory behind a storage of the host, as the device's.
at::DataPtr taken(c10::StorageImpl* from) {
  auto& p = from->_mutable_data_ptr_no_checks();
  at::DataPtr memory;
  if (p.get_context() && p.get_deleter() == cuda_allocator()->raw_deleter()) {
    memory = std::move(p);
    memory.unsafe_set_device(c10::Device(at::kCUDA, 0));
    from->set_data_ptr_noswap(at::DataPtr(memory.get(), at::kCPU));
  } else {
    memory = cuda_allocator()->allocate(p.get() ? from->nbytes() : 0);
    if (p.get()) std::memcpy(memory.get(), p.get(), from->nbytes());
  }
  return memory;
}

// --- one call ---

void wait_for_stream() { cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()); }

// Random numbers are the host's, begun anew for each call from the seed and the offset of the device's generator, which
// moves on. So its state is all there is to save, and the host's own generator is not touched.
struct Draws {
  at::Generator host = at::globalContext().defaultGenerator(at::kCPU);
  at::Generator device;
  Tensor before;
  explicit Draws(std::optional<at::Generator> given)
      : device(given ? *given : at::globalContext().defaultGenerator(c10::Device(at::kCUDA, 0))),
        before(host.get_state()) {
    std::lock_guard<std::mutex> guard(device.mutex());
    host.set_current_seed(device.current_seed() * 0x9E3779B97F4A7C15u + device.get_offset());
  }
  void moved() {
    std::lock_guard<std::mutex> guard(device.mutex());
    device.set_offset(device.get_offset() + 4);
  }
  ~Draws() { host.set_state(before); }
};

// Those that take tensors of the host beside the device's, on CUDA too.
bool takes_host_tensors(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index",         "aten::index_put",           "aten::index_put_",         "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_unsafe_index_put",   "aten::_unsafe_masked_index",
      "aten::_unsafe_masked_index_put_accumulate",        "aten::_pack_padded_sequence"};
  return names.count(name) > 0;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : schema_(op.schema()) {
    const auto& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      show((*stack)[stack->size() - arguments.size() + i], alias && alias->isWrite());
    }
    const bool mixed = written_on_host_ || (read_on_host_ && !takes_host_tensors(schema_.name()));
    TORCH_CHECK(!mixed || operands_.empty(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
                schema_.name(), ")");
    draws_ = op.hasTag(at::Tag::nondeterministic_seeded);
  }

  void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    wait_for_stream();
    std::optional<Draws> draws;
    if (draws_) draws.emplace(generator_);
    try {
      OnDevice on_device;
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(DispatchKey::AutocastCPU);
      op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
    } catch (const Refusal& refusal) {
      std::rethrow_exception(refusal.error);
    }
    if (draws) draws->moved();
    for (auto& [device, host] : operands_) write_back(device, host);
    const size_t returns = schema_.returns().size();
    for (size_t i = 0; i < returns; ++i) take((*stack)[stack->size() - returns + i]);
  }

 private:
  using Both = std::pair<Tensor, Tensor>;  // the device's, the host's

  Tensor show(const Tensor& t, bool write) {
    if (!on_cuda(t)) {
      if (t.defined() && t.is_cpu()) (write ? written_on_host_ : read_on_host_) |= write || t.dim() > 0;
      return t;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::kStrided, "the CUDA stand-in knows strided tensors only: ",
                                schema_.name());
    auto [known, is_new] = places_.emplace(t.unsafeGetTensorImpl(), operands_.size());
    if (!is_new) return operands_[known->second].second;
    // Those of one storage share one here as well, or kernels would not see that they overlap.
    auto [sharing, is_first] = places_.emplace(t.storage().unsafeGetStorageImpl(), operands_.size());
    Tensor host = is_first ? shown(t) : tensor_on(operands_[sharing->second].second.storage(), DispatchKey::CPU, t);
    places_.emplace(host.unsafeGetTensorImpl(), operands_.size());
    places_.emplace(host.storage().unsafeGetStorageImpl(), operands_.size());
    operands_.emplace_back(t, host);
    return host;
  }

  void show(c10::IValue& v, bool write) {
    if (v.isTensor()) {
      v = show(v.toTensor(), write);
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (Tensor t : v.toTensorList()) list.push_back(show(t, write));
      v = std::move(list);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : v.toOptionalTensorList())
        list.push_back(t ? std::optional<Tensor>(show(*t, write)) : t);
      v = std::move(list);
    } else if (v.isDevice()) {
      v = c10::Device(at::kCPU);
    } else if (v.isGenerator()) {
      generator_ = v.toGenerator();
      TORCH_CHECK(generator_->device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      v = c10::IValue();
    }
  }

  // An out= operator may have given an operand another size, and more memory for it.
  void write_back(const Tensor& device, const Tensor& host) {
    auto *storage = device.storage().unsafeGetStorageImpl(), *from = host.storage().unsafeGetStorageImpl();
    if (from->data() != storage->data()) {
      const size_t nbytes = from->nbytes();
      storage->set_data_ptr_noswap(taken(from));
      storage->set_nbytes(nbytes);
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides())
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  Tensor take(const Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    if (auto it = places_.find(t.unsafeGetTensorImpl()); it != places_.end()) return operands_[it->second].first;
    if (t.layout() == c10::kSparse) return take_sparse(t);
    auto* from = t.storage().unsafeGetStorageImpl();
    auto it = places_.find(from);
    if (it != places_.end()) return tensor_on(operands_[it->second].first.storage(), DispatchKey::CUDA, t);
    const size_t nbytes = from->nbytes();
    Tensor made = tensor_on(storage_of(taken(from), nbytes, cuda_allocator()), DispatchKey::CUDA, t);
    places_.emplace(from, operands_.size());
    operands_.emplace_back(made, t);
    return made;
  }

  Tensor take_sparse(const Tensor& t) {
    auto impl = [](const Tensor& sparse) { return static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl()); };
    auto made = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(DispatchKey::SparseCUDA), t.dtype());
    impl(made)->resize_(impl(t)->sparse_dim(), impl(t)->dense_dim(), t.sizes());
    impl(made)->set_indices_and_values_unsafe(take(impl(t)->indices()), take(impl(t)->values()));
    impl(made)->set_coalesced(impl(t)->coalesced());
    return made;
  }

  void take(c10::IValue& v) {
    if (v.isTensor()) {
      v = take(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (Tensor t : v.toTensorList()) list.push_back(take(t));
      v = std::move(list);
    }
  }

  const c10::FunctionSchema& schema_;
  std::vector<Both> operands_;
  std::unordered_map<const void*, size_t> places_;  // of tensors and storages of both kinds
  std::optional<at::Generator> generator_;
  bool read_on_host_ = false, written_on_host_ = false, draws_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(op, stack); }

// Torch's own, but where it would launch a kernel: on the device, with another type or order of elements.
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!on_cuda(to) || !on_cuda(from)) return at::native::copy_(to, from, non_blocking);
  wait_for_stream();
  Tensor target = shown(to);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::native::copy_(target, shown(from), false);
  return to;
}

void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}

bool stays(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names = {
      "aten::empty", "aten::empty_strided", "aten::set_",  "aten::resize_", "aten::record_stream",
      "aten::is_pinned", "aten::_pin_memory", "aten::_local_scalar_dense"};
  if (names.count(op.schema().name())) return true;
  for (const auto& r : op.schema().returns())  // views
    if (r.alias_info() && !r.alias_info()->isWrite()) return true;
  return false;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  struct Quiet final : c10::WarningHandler {  // torch warns of kernels that are registered in another's place
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::copy_" || name.name == "aten::_foreach_copy_") continue;
    auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(DispatchKey::CUDA) || stays(*op)) continue;
    if (!op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  m.impl("copy_", &copy_);
  m.impl("_foreach_copy_", &foreach_copy_);
  // These choose a kernel by the device's kind: let them see tensors of the host.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

[[maybe_unused]] const bool kSteered = [] {
  plain = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new SteeredAllocator, 1);
  auto& context = at::globalContext();  // no library but the host's kernels
  context.setUserEnabledCuDNN(false);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
  return true;
}();

}  // namespace
