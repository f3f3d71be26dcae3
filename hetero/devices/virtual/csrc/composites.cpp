// Composite operators that choose their way by the device's name, brought back to the CPU's way.
//
// Owns: the list of those operators. Without it they would compute right, but not bit for bit what the CPU
// computes: dropout would draw another mask, attention would take the unfused path, and recurrent layers
// would ask for kernels that only CUDA has.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "tensors.h"

namespace hetero {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- dropout ---

Tensor dropout_noise(const Tensor& input, double p) { return at::empty_like(input).bernoulli_(1 - p).div_(1 - p); }

void check_probability(double p) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
}

Tensor dropout(const Tensor& input, double p, bool train) {
  check_probability(p);
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  return input.mul(dropout_noise(input, p));
}

Tensor& dropout_(Tensor& input, double p, bool train) {
  check_probability(p);
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input.mul_(at::zeros({}, input.options()));
  return input.mul_(dropout_noise(input, p));
}

// --- attention ---

constexpr int64_t kMath = 0;  // SDPBackend::math, whose namespace differs between versions

// Which attention kernel the CPU would take: it looks at shapes, strides and requires_grad only.
int64_t fused_sdp_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  for (const Tensor* t : {&query, &key, &value})
    if (t->unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return kMath;
  auto show = [](const Tensor& t) {
    Tensor alias = on_device(t) ? alias_on_cpu(t) : t;
    if (on_device(t) && at::isFloatingType(t.scalar_type())) alias.set_requires_grad(t.requires_grad());
    return alias;
  };
  std::optional<Tensor> shown_mask;
  if (mask && mask->defined()) shown_mask = show(*mask);
  // Straight to the CPU's kernel: a dispatch mode is not to see the aliases.
  return at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), show(query), show(key),
                                                 show(value), shown_mask, dropout_p, is_causal, scale, enable_gqa);
}

// --- recurrent layers ---

// Their CPU implementation is many operators under one name. It runs whole, on aliases; what is saved for
// backward are the inputs, as device tensors, so that saved_tensors_hooks see them, and backward runs it
// again with gradients. As for cuDNN's, there is no double backward.
struct WithoutHooks {
  at::impl::SavedTensorDefaultHooksTLS before = at::SavedTensorDefaultHooks::get_tls_state();
  WithoutHooks() { at::SavedTensorDefaultHooks::set_tls_state({}); }
  ~WithoutHooks() { at::SavedTensorDefaultHooks::set_tls_state(before); }
};

// The arguments of a call with every tensor taken out: enough to call again with other tensors in their
// places.
struct Frame {
  std::vector<c10::IValue> arguments;  // for a tensor None, for a list of tensors their number
  std::vector<char> kinds;             // 't'ensor, 'l'ist, 'o'ther
  Tensor rng_state;                    // if it draws random numbers
};

variable_list take_out_tensors(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, Frame& frame) {
  variable_list tensors;
  bool train = false;
  double dropout = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& v = arguments[i];
    const auto& name = op.schema().arguments()[i].name();
    if (name == "train") train = v.toBool();
    if (name == "dropout") dropout = v.toDouble();
    if (v.isTensor()) {
      tensors.push_back(v.toTensor());
      frame.arguments.emplace_back();
      frame.kinds.push_back('t');
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      frame.arguments.emplace_back(static_cast<int64_t>(list.size()));
      frame.kinds.push_back('l');
      tensors.insert(tensors.end(), list.begin(), list.end());
    } else {
      frame.arguments.push_back(v);
      frame.kinds.push_back('o');
    }
  }
  if (train && dropout > 0) frame.rng_state = at::detail::getDefaultCPUGenerator().get_state();
  return tensors;
}

variable_list call_frame(const c10::OperatorHandle& op, const Frame& frame, const variable_list& tensors) {
  torch::jit::Stack stack;
  auto next = tensors.begin();
  for (size_t i = 0; i < frame.kinds.size(); ++i) {
    if (frame.kinds[i] == 't') {
      stack.emplace_back(*next++);
    } else if (frame.kinds[i] == 'l') {
      const auto n = frame.arguments[i].toInt();
      stack.emplace_back(std::vector<Tensor>(next, next + n));
      next += n;
    } else {
      stack.push_back(frame.arguments[i]);
    }
  }
  op.callBoxed(&stack);
  variable_list out;
  for (const auto& v : stack) out.push_back(v.toTensor());
  return out;
}

// Aliases of the operands, after recording that s reads them.
variable_list show_all(Stream& s, const variable_list& tensors) {
  c10::SmallVector<Use, 16> uses;
  variable_list shown;
  for (const auto& t : tensors) {
    if (on_device(t)) uses.push_back(use_of(t, false));
    shown.push_back(on_device(t) ? alias_on_cpu(t) : t);
  }
  record_uses(s, uses);
  return shown;
}

// Device tensors for what the CPU made; those that share a storage go on sharing it.
variable_list adopt_all(const variable_list& made) {
  variable_list adopted(made.size());
  for (size_t i = 0; i < made.size(); ++i) {
    if (!made[i].defined()) continue;
    for (size_t j = 0; j < i && !adopted[i].defined(); ++j)
      if (made[j].defined() && made[j].storage().is_alias_of(made[i].storage()))
        adopted[i] = tensor_on(adopted[j].storage(), c10::DispatchKey::PrivateUse1, made[i]);
    if (!adopted[i].defined()) adopted[i] = adopt(made[i]);
  }
  return adopted;
}

// Operators see autograd again, as if nothing above had dispatched: the graph on the CPU is one of its own. Dispatch
// modes go on to see operators: who tries them again when they find no memory has to see the first ones as well.
struct AsIfAtTheTop {
  explicit AsIfAtTheTop(bool gradients) : mode(gradients) {}
  static c10::DispatchKeySet included() {
    return c10::default_included_set | (c10::impl::tls_local_dispatch_key_set().included_ & c10::python_ks);
  }
  c10::impl::ForceDispatchKeyGuard keys{included(), c10::default_excluded_set};
  at::AutoGradMode mode;
};

// The CPU's generator is in that state, if there is one, and is put back whatever happens.
struct RngStateOf {
  explicit RngStateOf(const Tensor& then) {
    if (!then.defined()) return;
    now = generator.get_state();
    generator.set_state(then);
  }
  ~RngStateOf() {
    if (now.defined()) generator.set_state(now);
  }
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  Tensor now;
};

struct FrameHolder : torch::CustomClassHolder {
  Frame frame;
  bool wants_gradients;
  std::optional<c10::OperatorHandle> op;
};

struct Recomputed : torch::autograd::Function<Recomputed> {
  static variable_list forward(AutogradContext* ctx, c10::intrusive_ptr<FrameHolder> held, at::TensorList list) {
    variable_list tensors = list.vec();
    ctx->save_for_backward(tensors);
    ctx->saved_data["frame"] = c10::IValue::make_capsule(held);
    Stream& s = stream(current_stream());
    variable_list shown = show_all(s, tensors), out;
    {
      // The CPU may choose another kernel when gradients are wanted: build a graph as it would, and drop it.
      InlineWork inline_work(s);
      WithoutHooks without_hooks;
      AsIfAtTheTop at_the_top(held->wants_gradients);
      for (size_t i = 0; i < shown.size(); ++i) shown[i].set_requires_grad(tensors[i].requires_grad());
      out = call_frame(*held->op, held->frame, shown);
    }
    return adopt_all(out);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    auto held = c10::static_intrusive_pointer_cast<FrameHolder>(ctx->saved_data["frame"].toCapsule());
    variable_list tensors = ctx->get_saved_variables();
    Stream& s = stream(current_stream());
    variable_list shown = show_all(s, tensors), shown_grads = show_all(s, grad_outputs);
    variable_list wanted, outputs, output_grads, result(1 + tensors.size());
    std::vector<size_t> wanted_at;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!ctx->needs_input_grad(i)) continue;
      shown[i].set_requires_grad(true);
      wanted.push_back(shown[i]);
      wanted_at.push_back(i);
    }
    variable_list grads;
    {
      InlineWork inline_work(s);
      WithoutHooks without_hooks;
      grads = recompute(*held, shown, shown_grads, wanted);
    }
    grads = adopt_all(grads);
    for (size_t i = 0; i < grads.size(); ++i) result[1 + wanted_at[i]] = grads[i];
    return result;
  }

 private:
  static variable_list recompute(const FrameHolder& held, const variable_list& shown, const variable_list& shown_grads,
                                 const variable_list& wanted) {
    AsIfAtTheTop at_the_top(true);
    variable_list out, roots, root_grads;
    {
      RngStateOf rng(held.frame.rng_state);
      out = call_frame(*held.op, held.frame, shown);
    }
    for (size_t i = 0; i < out.size(); ++i) {
      if (!shown_grads[i].defined() || !out[i].requires_grad()) continue;
      roots.push_back(out[i]);
      root_grads.push_back(shown_grads[i]);
    }
    if (roots.empty()) return variable_list(wanted.size());
    try {
      return torch::autograd::grad(roots, wanted, root_grads, false, false, true);
    } catch (python_error& error) {
      // The engine within has set it as this thread's Python error as well, which the next backward would meet.
      pybind11::gil_scoped_acquire gil;
      error.persist();
      PyErr_Clear();
      throw;
    }
  }
};

bool has_python_tensor(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  auto python = [](const Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::Python); };
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    if (stack[i].isTensor() && python(stack[i].toTensor())) return true;
    if (!stack[i].isTensorList()) continue;
    for (Tensor t : stack[i].toTensorList())
      if (python(t)) return true;
  }
  return false;
}

void recomputed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (has_python_tensor(op, *stack)) {
    // Fake tensors have no bytes to show to the CPU: leave them to the composite kernel.
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
    return;
  }
  auto held = c10::make_intrusive<FrameHolder>();
  held->op = op;
  const size_t n = op.schema().arguments().size();
  variable_list tensors =
      take_out_tensors(op, c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - n, n), held->frame);
  torch::jit::drop(*stack, n);
  auto wants = [](const Tensor& t) { return t.requires_grad(); };
  held->wants_gradients = at::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), wants);
  for (auto& t : Recomputed::apply(held, at::TensorList(tensors))) stack->emplace_back(std::move(t));
}

constexpr const char* kRecurrent[] = {"lstm.input",     "lstm.data",     "gru.input",      "gru.data",
                                      "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data",
                                      "lstm_cell",      "gru_cell"};

void register_composites(torch::Library& m) {
  m.impl("dropout", &dropout);
  m.impl("dropout_", &dropout_);
  for (const char* name : kRecurrent) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&recomputed>());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_composites(m); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { register_composites(m); }

}  // namespace hetero

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &hetero::fused_sdp_choice)
}
