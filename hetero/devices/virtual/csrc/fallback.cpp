// The boxed fallback: any operator that has a CPU kernel, run on device memory.
//
// Owns: the calling convention. Operands are shown to the CPU kernel as aliases of their own bytes; whatever the kernel allocates is
// device memory from the start, so results are handed over, not copied, and count once. Operands must all be on the
// device, but for 0-dim CPU tensors and the few arguments that CUDA too takes from the host.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <unordered_map>

#include "tensors.h"

namespace hetero {
namespace {

// What the schema says, read once per operator.
struct Plan {
  struct Argument { bool write, view; };
  c10::SmallVector<Argument, 12> arguments;
  bool takes_host_tensors;
  bool returns_host_value;  // a bool or a number: the host has waited for the stream
};

bool starts_with_any(const std::string& name, std::initializer_list<const char*> prefixes) {
  for (const char* p : prefixes)
    if (name.rfind(p, 0) == 0) return true;
  return false;
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
  plan.takes_host_tensors = starts_with_any(
      schema.name(), {"aten::index", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_masked_index",
                      "aten::_pack_padded_sequence", "aten::_pin_memory", "aten::_fused_"});
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
  bool write;
};

struct Call {
  const c10::OperatorHandle& op;
  const Plan& plan;
  c10::SmallVector<Operand, 8> operands;
  c10::SmallVector<Use, 8> uses;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 4> adopted;  // CPU storage -> device storage
  at::Tensor host_operand, host_written;

  at::Tensor show(const at::Tensor& t, const Plan::Argument& a);
  void show_argument(c10::IValue& v, const Plan::Argument& a);
  void check_devices() const;
  void write_back();
  at::Tensor take(const at::Tensor& t);
  void take_return(c10::IValue& v);
};

// The alias that the CPU kernel gets for operand t. Operands on one storage share one alias storage, so that the
// kernel's own overlap checks hold and views of it are recognised.
at::Tensor Call::show(const at::Tensor& t, const Plan::Argument& a) {
  if (!t.defined()) return t;
  if (!on_device(t)) {
    if (t.device().is_cpu()) {
      if (a.write) host_written = t;
      else if (t.dim() > 0) host_operand = t;
    }
    return t;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::kStrided, "virtual accelerator: ", op.schema().name(),
                              " does not take a tensor of layout ", t.layout());
  if (!a.view) uses.push_back(use_of(t, a.write));
  at::Tensor alias;
  for (auto& o : operands) {
    if (o.device.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) {
      o.write |= a.write;
      return o.alias;
    }
    if (!alias.defined() && o.device.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) {
      alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(o.alias.storage()),
                                                       c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
      alias.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    }
  }
  if (!alias.defined()) alias = alias_on_cpu(t);
  operands.push_back({t, alias, a.write});
  if (!a.view) uses.back().tensor = &t;
  return alias;
}

void Call::show_argument(c10::IValue& v, const Plan::Argument& a) {
  if (v.isTensor()) {
    const at::Tensor& t = v.toTensor();
    if (t.defined()) v = show(t, a);
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
  const bool mixed = !operands.empty() && (host_written.defined() || (host_operand.defined() && !plan.takes_host_tensors));
  TORCH_CHECK(!mixed, "Expected all tensors to be on the same device, but found at least two devices, virtual:0 and cpu! (in ",
              op.schema().name(), ", which got a ", describe(host_written.defined() ? host_written : host_operand),
              " on the cpu)");
}

// out= operators may have resized an operand, or given it other strides: carry that over to the device tensor.
void Call::write_back() {
  for (auto& o : operands) {
    if (!o.write) continue;
    auto* storage = o.device.storage().unsafeGetStorageImpl();
    auto* shown = o.alias.storage().unsafeGetStorageImpl();
    auto& p = shown->_mutable_data_ptr_no_checks();
    if (Block* b = block_of(p); b && b->place == Place::kDevice) {
      at::DataPtr moved = std::move(p);
      moved.unsafe_set_device(kDevice);
      shown->set_data_ptr_noswap(at::DataPtr(moved.get(), c10::Device(c10::DeviceType::CPU)));
      storage->set_data_ptr_noswap(std::move(moved));
      storage->set_nbytes(shown->nbytes());
    }
    if (o.alias.sizes() != o.device.sizes() || o.alias.strides() != o.device.strides())
      o.device.unsafeGetTensorImpl()->set_sizes_and_strides(o.alias.sizes(), o.alias.strides(), o.alias.storage_offset());
  }
}

// The device tensor for what the CPU kernel returned.
at::Tensor Call::take(const at::Tensor& t) {
  if (!t.defined() || !t.device().is_cpu()) return t;
  for (auto& o : operands)
    if (o.alias.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return o.device;
  if (host_written.defined() && host_written.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return t;
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::kStrided, "virtual accelerator: ", op.schema().name(),
                              " made a tensor of layout ", t.layout());
  auto* storage = t.storage().unsafeGetStorageImpl();
  for (auto& o : operands)
    if (o.alias.storage().unsafeGetStorageImpl() == storage) return device_view(o.device.storage(), t);
  for (auto& [cpu, device] : adopted)
    if (cpu == storage) return device_view(device, t);
  at::Tensor result = adopt(t);
  adopted.emplace_back(storage, result.storage());
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

}  // namespace

void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t arguments = schema.arguments().size(), returns = schema.returns().size();
  Call call{op, plan_of(schema)};
  std::vector<c10::IValue> kept(stack->end() - arguments, stack->end());  // keeps the device operands alive
  for (size_t i = 0; i < arguments; ++i)
    call.show_argument((*stack)[stack->size() - arguments + i], call.plan.arguments[i]);
  call.check_devices();
  for (auto& u : call.uses)
    for (auto& o : call.operands)
      if (u.tensor->unsafeGetTensorImpl() == o.device.unsafeGetTensorImpl()) u.tensor = &o.device;
  Stream& s = stream(current_stream());
  record_uses(s, call.uses);
  {
    std::lock_guard<std::recursive_mutex> lock(s.exec);
    s.settle();
    AllocateOnDevice on_device;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet(c10::DispatchKey::AutocastCPU));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.write_back();
  for (size_t i = 0; i < returns; ++i) call.take_return((*stack)[stack->size() - returns + i]);
  if (call.plan.returns_host_value) {
    std::lock_guard<std::mutex> lock(state_mutex());
    host_joins(s);
  }
}

// Operators with a CPU kernel of their own get the fallback explicitly: otherwise the dispatcher would prefer a
// composite kernel, which is slower and may compute in another order than the CPU does.
void register_cpu_kernels(torch::Library& library, c10::ArrayRef<std::string> own) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (std::find(own.begin(), own.end(), full) != own.end()) continue;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>()); }

}  // namespace hetero
