// The boxed CPU fallback, for the files that register it.
#pragma once
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace hetero {

// Runs an operator's CPU kernel on device memory; see fallback.cpp.
void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Gives every operator that has a CPU kernel of its own the fallback explicitly, unless it has a device
// kernel: otherwise the dispatcher would prefer a composite kernel, which is slower and may compute in
// another order than the CPU does.
void register_cpu_kernels(torch::Library& library);

}  // namespace hetero
