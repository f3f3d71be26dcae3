// Registers the device with PyTorch: allocator, device guard (streams, events), hooks (pinning, resizing),
// generator.
//
// Owns: nothing but the translation between PyTorch's interfaces and memory.h / streams.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "memory.h"
#include "streams.h"
#include "tensors.h"

namespace hetero {

void check_device_index(c10::DeviceIndex index) {
  TORCH_CHECK(index <= 0, "virtual:", static_cast<int>(index),
              " does not exist: there is one virtual accelerator, virtual:0");
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  static c10::Stream wrap(int id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device d) const override { check_device_index(d.index()); return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device d) const override { check_device_index(d.index()); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return wrap(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return wrap(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return wrap(new_stream_id()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return wrap(new_stream_id()); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = wrap(current_stream());
    set_current_stream(static_cast<int>(s.id()));
    return old;
  }
  bool queryStream(const c10::Stream& s) const override { return query_stream(stream(s.id())); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize_stream(stream(s.id())); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_device(); }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    record_event(*static_cast<Event*>(*event), stream(s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) wait_event(*static_cast<Event*>(event), stream(s.id()));
  }
  bool queryEvent(void* event) const override { return !event || query_event(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_event(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "elapsed_time: both events must be recorded first");
    auto& a = *static_cast<Event*>(begin)->ticket;
    auto& b = *static_cast<Event*>(end)->ticket;
    TORCH_CHECK(a.finished() && b.finished(), "elapsed_time: both events must be complete: synchronize them first");
    return std::chrono::duration<double, std::milli>(b.finished_at() - a.finished_at()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    device_allocator().recordStream(p, s);
  }
};

// A generator of the device: a CPU generator that answers to the device's name. The default one *is* the
// CPU's, so that a seeded run gives the same numbers on both.
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(at::Generator cpu)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(cpu).seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(cpu.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex index) const override { check_device_index(index); }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { check_device_index(index); return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { check_device_index(index); return 0; }
  bool isPinnedPtr(const void* p) const override { return host_block_at(p) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto* g = new at::Generator(c10::make_intrusive<Generator>(at::detail::getDefaultCPUGenerator()));
    return *g;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::Generator(c10::make_intrusive<Generator>(at::detail::createCPUGenerator()));
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t nbytes) const override {
    resize_storage(s.unsafeGetStorageImpl(), nbytes);
  }
};

}  // namespace

at::Generator cpu_generator(const at::Generator& g) {
  if (g.device().type() != c10::DeviceType::PrivateUse1) return g;
  return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu;
}

void register_device() {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator());
  install_cpu_allocator();
  static c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::PrivateUse1, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace hetero
