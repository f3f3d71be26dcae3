// The Python face of the device: what torch's own API does not cover.
#include <torch/csrc/Exceptions.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "tensors.h"

namespace py = pybind11;

namespace hetero {

void register_device();

namespace {

PyObject* race_error = nullptr;

void check_host_access(const at::Tensor& t, bool write) {
  if (t.numel() == 0) return;
  const Use use = use_of(t, write);
  TORCH_CHECK_VALUE(use.block && use.block->place != Place::kDevice,
                    "check_host_access: expected a tensor in pinned or registered host memory, got ", describe(t),
                    " on ", t.device());
  std::string race;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    auto earlier = use.block->history.unordered(host_clock(), write, use.begin, use.end);
    if (!earlier) return;
    race = std::string("the host ") + (write ? "writes" : "reads") + " pinned tensor " + describe(t) + " while " +
           describe(*earlier) +
           " it, and the host has not waited for that: synchronize an event recorded after the copy";
    report_race(race, false);
  }
  raise_race(race);
}

// What `hetero.devices.accelerator` reads of the allocator's counters, as `memory_stats_as_nested_dict` has it: to make
// all that for each operator takes longer than the operator.
py::dict memory_counters() {
  using c10::CachingAllocator::StatType;
  const auto stats = device_allocator().getDeviceStats(0);
  auto named = [](const c10::CachingAllocator::Stat& stat) {
    py::dict numbers;
    numbers["current"] = stat.current, numbers["peak"] = stat.peak, numbers["allocated"] = stat.allocated;
    return numbers;
  };
  auto of = [&](const c10::CachingAllocator::StatArray& pools) {
    py::dict numbers;
    numbers["all"] = named(pools[static_cast<size_t>(StatType::AGGREGATE)]);
    numbers["large_pool"] = named(pools[static_cast<size_t>(StatType::LARGE_POOL)]);
    return numbers;
  };
  py::dict counters;
  counters["allocated_bytes"] = of(stats.allocated_bytes);
  counters["requested_bytes"] = of(stats.requested_bytes);
  counters["num_ooms"] = stats.num_ooms;
  return counters;
}

}  // namespace

[[noreturn]] void raise_race(const std::string& message) {
  py::gil_scoped_acquire gil;
  PyErr_SetString(race_error ? race_error : PyExc_RuntimeError, message.c_str());
  python_error error;
  error.persist();
  throw error;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  register_device();
  m.def("set_race_error", [](py::object cls) { race_error = cls.release().ptr(); });
  m.def("races", &races, Released());
  m.def("clear_races", &clear_races, Released());
  m.def("memory_limit", &memory_limit, Released());
  m.def("set_memory_limit", &set_memory_limit, Released());
  m.def("allocated_and_peak", &allocated_and_peak, Released());
  m.def("memory_counters", &memory_counters);
  m.def("reserved_and_peak", &reserved_and_peak, Released());
  m.def("set_in_segments", &set_in_segments, Released());
  m.def("is_in_segments", &is_in_segments);
  m.def("set_link", &set_link, Released());
  m.def("link", &link, Released());
  m.def("keep_busy", &keep_busy, Released());
  m.def("host_register", [](uintptr_t p, size_t n) { host_register(reinterpret_cast<void*>(p), n); }, Released());
  m.def("host_unregister", [](uintptr_t p) { host_unregister(reinterpret_cast<void*>(p)); }, Released());
  m.def("offer_slots", [](uintptr_t owner, const std::vector<std::array<size_t, 3>>& slots) {
    offer_slots(reinterpret_cast<void*>(owner), slots);
  });
  m.def("withdraw_slots", &withdraw_slots);
  m.def("check_host_access", &check_host_access, Released());
}

}  // namespace hetero
