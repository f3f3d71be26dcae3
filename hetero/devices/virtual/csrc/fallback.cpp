// The boxed fallback: any operator that has a CPU kernel, run on device memory.
//
// Owns: the calling convention. Operands are shown to the CPU kernel as aliases of their own bytes; whatever
// the kernel allocates is device memory from the start, so results are handed over, not copied, and count
// once. Operands must all be on the device, but for 0-dim CPU tensors and the few arguments that CUDA too
// takes from the host.
#include "fallback.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <unordered_map>
#include <unordered_set>

#include "tensors.h"

namespace hetero {
namespace {

// What the schema says, read once per operator and thread.
struct Plan {
  struct Argument { bool write, view; };
  c10::SmallVector<Argument, 12> arguments;
  bool takes_host_tensors;
  bool returns_host_value;  // a bool or a number: the host has waited for the stream
  bool does_without;        // what its CPU kernel finds no memory for
};

// The operators that take some of their tensors from the host, on CUDA too: indices, lengths, step counts.
bool takes_host_tensors(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index",         "aten::index_put",           "aten::index_put_",          "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_unsafe_index_put",   "aten::_unsafe_masked_index",
      "aten::_unsafe_masked_index_put_accumulate",
      "aten::_pack_padded_sequence", "aten::_fused_adam_", "aten::_fused_adamw_",      "aten::_fused_sgd_",
      "aten::_fused_adagrad_"};
  return names.count(name) > 0;
}

// Products that oneDNN computes. Whatever it fails with, want of memory too, has ATen switch it off in the whole process
// and compute otherwise, with other bits, from then on.
bool does_without(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::_native_multi_head_attention",
      "aten::_transformer_encoder_layer_fwd"};
  return names.count(name) > 0;
}

const Plan& plan_of(const c10::FunctionSchema& schema) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Plan> plans;
  auto it = plans.find(&schema);
  if (it != plans.end()) return it->second;
  Plan plan;
  for (const auto& a : schema.arguments()) {
    const auto* info = a.alias_info();
    plan.arguments.push_back({info && info->isWrite(), info && !info->isWrite()});
  }
  plan.takes_host_tensors = takes_host_tensors(schema.name());
  plan.does_without = does_without(schema.name());
  plan.returns_host_value = false;
  for (const auto& r : schema.returns()) {
    auto kind = r.type()->kind();
    plan.returns_host_value |= kind == c10::TypeKind::BoolType || kind == c10::TypeKind::IntType ||
                               kind == c10::TypeKind::FloatType || kind == c10::TypeKind::NumberType;
  }
  return plans.emplace(&schema, std::move(plan)).first->second;
}

struct Operand {
  at::Tensor device, alias;
  bool write, view;
};

// The operands of one call, each tensor once, in the order in which they come. A step's lists have thousands.
class Operands {
 public:
  void add(Operand o) {
    const size_t place = all_.size();
    all_.push_back(std::move(o));
    if (place >= kFew) {
      if (places_.empty())
        for (size_t i = 0; i < place; ++i) note(i);
      note(place);
    }
  }
  // The one with this tensor, or the first in this storage; on the device, or the alias of one. Null: there is none.
  Operand* find(const void* tensor_or_storage) {
    if (places_.empty()) {
      for (Operand& o : all_)
        for (const void* name : names(o))
          if (name == tensor_or_storage) return &o;
      return nullptr;
    }
    auto it = places_.find(tensor_or_storage);
    return it == places_.end() ? nullptr : &all_[it->second];
  }
  bool empty() const { return all_.empty(); }
  auto begin() { return all_.begin(); }
  auto end() { return all_.end(); }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

 private:
  static constexpr size_t kFew = 8;  // are looked through as fast as they are looked up
  static std::array<const void*, 4> names(const Operand& o) {
    return {o.device.unsafeGetTensorImpl(), o.alias.unsafeGetTensorImpl(),
            o.device.storage().unsafeGetStorageImpl(), o.alias.storage().unsafeGetStorageImpl()};
  }
  void note(size_t place) {
    for (const void* name : names(all_[place])) places_.emplace(name, place);  // the first one stays
  }
  c10::SmallVector<Operand, 8> all_;
  std::unordered_map<const void*, size_t> places_;
};

struct SparseOperand {
  at::Tensor device, alias;
  bool write;
};

struct Call {
  const c10::OperatorHandle& op;
  const Plan& plan;
  Operands operands;
  c10::SmallVector<SparseOperand, 1> sparse_operands;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 4> adopted;  // CPU storage -> device storage
  at::Tensor host_operand, host_written;

  at::Tensor show(const at::Tensor& t, const Plan::Argument& a);
  at::Tensor show_sparse(const at::Tensor& t, const Plan::Argument& a);
  void show_argument(c10::IValue& v, const Plan::Argument& a);
  void check_devices() const;
  void record(Stream& s) const;
  void write_back();
  at::Tensor take(const at::Tensor& t);
  at::Tensor take_sparse(const at::Tensor& t);
  void take_return(c10::IValue& v);
};

at::SparseTensorImpl* sparse_impl(const at::Tensor& t) {
  return static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl());
}

// The alias that the CPU kernel gets for operand t. Operands on one storage share one alias storage, so that
// the kernel's own overlap checks hold and views of it are recognised.
at::Tensor Call::show(const at::Tensor& t, const Plan::Argument& a) {
  if (!on_device(t)) {
    if (t.defined() && t.device().is_cpu()) {
      if (a.write) host_written = t;
      else if (t.dim() > 0) host_operand = t;
    }
    return t;
  }
  if (t.layout() != c10::kStrided) return show_sparse(t, a);
  if (Operand* same = operands.find(t.unsafeGetTensorImpl())) {
    same->write |= a.write;
    same->view &= a.view;
    return same->alias;
  }
  Operand* shares = operands.find(t.storage().unsafeGetStorageImpl());
  at::Tensor alias = shares ? tensor_on(shares->alias.storage(), c10::DispatchKey::CPU, t) : alias_on_cpu(t);
  operands.add({t, alias, a.write, a.view});
  return alias;
}

at::Tensor Call::show_sparse(const at::Tensor& t, const Plan::Argument& a) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::kSparse, "virtual accelerator: ", op.schema().name(),
                              " does not take a tensor of layout ", t.layout());
  for (auto& o : sparse_operands)
    if (o.device.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return o.alias;
  auto* impl = sparse_impl(t);
  at::Tensor indices = show(impl->indices(), a), values = show(impl->values(), a);
  at::Tensor alias = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(c10::DispatchKey::SparseCPU),
                                                                   t.dtype());
  sparse_impl(alias)->resize_(impl->sparse_dim(), impl->dense_dim(), t.sizes());
  sparse_impl(alias)->set_indices_and_values_unsafe(indices, values);
  sparse_impl(alias)->set_coalesced(impl->coalesced());
  sparse_operands.push_back({t, alias, a.write});
  return alias;
}

void Call::show_argument(c10::IValue& v, const Plan::Argument& a) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) v = show(v.toTensor(), a);
  } else if (v.isTensorList()) {
    c10::List<at::Tensor> shown;
    auto list = v.toTensorList();
    shown.reserve(list.size());
    for (at::Tensor t : list) shown.push_back(show(t, a));
    v = std::move(shown);
  } else if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> shown;
    for (std::optional<at::Tensor> t : v.toOptionalTensorList())
      shown.push_back(t ? std::optional<at::Tensor>(show(*t, a)) : t);
    v = std::move(shown);
  } else if (v.isDevice()) {
    if (v.toDevice().type() == c10::DeviceType::PrivateUse1) v = c10::Device(c10::DeviceType::CPU);
  } else if (v.isGenerator()) {
    v = cpu_generator(v.toGenerator());
  }
}

void Call::check_devices() const {
  if (operands.empty()) return;
  const bool mixed = host_written.defined() || (host_operand.defined() && !plan.takes_host_tensors);
  TORCH_CHECK(!mixed,
              "Expected all tensors to be on the same device, but found at least two devices, virtual:0 and cpu! (",
              op.schema().name(), " got the tensor ", describe(host_written.defined() ? host_written : host_operand),
              " on the cpu)");
}

void Call::record(Stream& s) const {
  c10::SmallVector<Use, 8> uses;
  for (auto& o : operands)
    if (!o.view) uses.push_back(use_of(o.device, o.write));
  record_uses(s, uses);
}

// out= operators may have resized an operand, or given it other strides: carry that over to the device
// tensor.
void Call::write_back() {
  for (auto& o : operands) {
    if (!o.write) continue;
    auto* storage = o.device.storage().unsafeGetStorageImpl();
    auto* shown = o.alias.storage().unsafeGetStorageImpl();
    if (shown->data() != storage->data()) {
      storage->set_data_ptr_noswap(take_memory(shown));
      storage->set_nbytes(shown->nbytes());
      shown->set_data_ptr_noswap(at::DataPtr(storage->mutable_data(), c10::Device(c10::DeviceType::CPU)));
    }
    if (o.alias.sizes() != o.device.sizes() || o.alias.strides() != o.device.strides())
      o.device.unsafeGetTensorImpl()->set_sizes_and_strides(o.alias.sizes(), o.alias.strides(),
                                                            o.alias.storage_offset());
  }
  for (auto& o : sparse_operands) {
    if (!o.write) continue;
    auto *to = sparse_impl(o.device), *from = sparse_impl(o.alias);
    to->raw_resize_(from->sparse_dim(), from->dense_dim(), o.alias.sizes());
    to->set_indices_and_values_unsafe(take(from->indices()), take(from->values()));
    to->set_coalesced(from->coalesced());
  }
}

// The device tensor for what the CPU kernel returned.
at::Tensor Call::take(const at::Tensor& t) {
  if (!t.defined() || !t.device().is_cpu()) return t;
  if (t.layout() != c10::kStrided) return take_sparse(t);
  if (Operand* given = operands.find(t.unsafeGetTensorImpl())) return given->device;
  if (host_written.defined() && host_written.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return t;
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (Operand* shares = operands.find(storage)) return view_of(shares->device, t);
  for (auto& [cpu, device] : adopted)
    if (cpu == storage) return tensor_on(device, c10::DispatchKey::PrivateUse1, t);
  at::Tensor result = adopt(t);
  adopted.emplace_back(storage, result.storage());
  return result;
}

at::Tensor Call::take_sparse(const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::kSparse, "virtual accelerator: ", op.schema().name(),
                              " made a tensor of layout ", t.layout());
  for (auto& o : sparse_operands)
    if (o.alias.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return o.device;
  auto* from = sparse_impl(t);
  at::Tensor result = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), t.dtype());
  sparse_impl(result)->resize_(from->sparse_dim(), from->dense_dim(), t.sizes());
  sparse_impl(result)->set_indices_and_values_unsafe(take(from->indices()), take(from->values()));
  sparse_impl(result)->set_coalesced(from->coalesced());
  return result;
}

void Call::take_return(c10::IValue& v) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) v = take(v.toTensor());
  } else if (v.isTensorList()) {
    c10::List<at::Tensor> taken;
    for (at::Tensor t : v.toTensorList()) taken.push_back(take(t));
    v = std::move(taken);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey cpu_key) {
  const auto& schema = op.schema();
  const size_t arguments = schema.arguments().size(), returns = schema.returns().size();
  Call call{op, plan_of(schema)};
  for (size_t i = 0; i < arguments; ++i)
    call.show_argument((*stack)[stack->size() - arguments + i], call.plan.arguments[i]);
  call.check_devices();
  Stream& s = stream(current_stream());
  call.record(s);
  try {
    InlineWork inline_work(s);
    std::optional<RefuseForGood> for_good;
    if (call.plan.does_without) for_good.emplace();
    op.redispatchBoxed(c10::DispatchKeySet(cpu_key), stack);
  } catch (const Refusal& refusal) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, refusal.what);
  }
  call.write_back();
  for (size_t i = 0; i < returns; ++i) call.take_return((*stack)[stack->size() - returns + i]);
  if (call.plan.returns_host_value) {
    std::lock_guard<std::mutex> lock(state_mutex());
    host_joins(s);
  }
}

void sparse_cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_cpu(op, stack, c10::DispatchKey::SparseCPU);
}

}  // namespace

void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_cpu(op, stack, c10::DispatchKey::CPU);
}

namespace {

// Registers `fallback` for every operator that has a kernel of its own for cpu_key, but none for device_key.
template <c10::BoxedKernel::BoxedKernelFunction* fallback>
void register_kernels_like(torch::Library& library, c10::DispatchKey cpu_key, c10::DispatchKey device_key) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(cpu_key) || op->hasKernelForDispatchKey(device_key)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<fallback>());
  }
}

}  // namespace

void register_cpu_kernels(torch::Library& library) {
  register_kernels_like<&cpu_fallback>(library, c10::DispatchKey::CPU, c10::DispatchKey::PrivateUse1);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  register_kernels_like<&sparse_cpu_fallback>(m, c10::DispatchKey::SparseCPU, c10::DispatchKey::SparsePrivateUse1);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>()); }

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sparse_cpu_fallback>());
}

}  // namespace hetero
