// Owns the aliasing of tensors; see tensors.h.
#include "tensors.h"

#include <cstring>
#include <sstream>

namespace hetero {
namespace {

void no_delete(void*) {}

// The bytes [begin, end) of the storage that t spans.
std::pair<size_t, size_t> hull(const at::Tensor& t) {
  int64_t last = 0;
  auto sizes = t.sizes(), strides = t.strides();
  for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  const size_t item = t.itemsize(), offset = t.storage_offset();
  return {offset * item, (offset + last + 1) * item};
}

void copy_geometry(const at::Tensor& from, const at::Tensor& to) {
  auto* impl = to.unsafeGetTensorImpl();
  if (from.dim() != 1 || from.sizes()[0] != 0 || from.storage_offset() != 0)
    impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}

}  // namespace

std::string describe(const at::Tensor& t) {
  std::ostringstream out;
  out << c10::toString(t.scalar_type()) << t.sizes();
  return out.str();
}

Use use_of(const at::Tensor& t, bool write) {
  Use use{nullptr, 0, 0, write, &t};
  if (t.numel() == 0) return use;
  std::tie(use.begin, use.end) = hull(t);
  auto* storage = t.storage().unsafeGetStorageImpl();
  const auto& p = storage->_mutable_data_ptr_no_checks();
  if (on_device(t)) {
    TORCH_CHECK(use.end <= storage->nbytes() && p.get(), "virtual accelerator: illegal memory access: tensor ",
                describe(t),
                " needs ", use.end, " bytes of a storage that holds ", storage->nbytes(), " (was it freed by resize_?)");
    use.block = block_of(p);
  } else if (!(use.block = block_of(p)) || use.block->place == Place::kDevice) {
    use.block = host_block_at(static_cast<const char*>(p.get()) + use.begin);
  }
  if (use.block) {
    // A storage may begin inside its block, as a slice of a registered slab does.
    const size_t shift = static_cast<const char*>(p.get()) - use.block->data;
    use.begin += shift, use.end += shift;
  }
  return use;
}

void record_uses(Stream& s, c10::ArrayRef<Use> uses) {
  raise_deferred_race();
  std::string race;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    const Clock& clock = clock_now(s);
    for (const Use& u : uses) {
      if (!u.block) continue;
      auto conflict = u.block->history.record(s.epoch(u.write ? Access::kWrite : Access::kRead), clock, host_clock(),
                                              u.begin, u.end);
      if (!conflict) continue;
      const char* host = u.block->place == Place::kDevice ? "" : "pinned ";
      char block[64];
      snprintf(block, sizeof block, "%p, %zu bytes", static_cast<void*>(u.block->data), u.block->requested);
      race = "stream " + std::to_string(s.id) + (u.write ? " writes " : " reads ") + host + "tensor " +
             describe(*u.tensor) + " (block " + block + ") which " + describe(*conflict) +
             ", and no wait orders the two: record an event on stream " + std::to_string(conflict->stream) +
             " after that and make stream " + std::to_string(s.id) + " wait for it";
      report_race(race, false);
      forgive(s, *conflict);
      break;
    }
  }
  if (!race.empty()) raise_race(race);
}

at::Tensor alias_on_cpu(const at::Tensor& t) {
  auto* source = t.storage().unsafeGetStorageImpl();
  at::DataPtr p(source->_mutable_data_ptr_no_checks().get(), nullptr, &no_delete, c10::Device(c10::DeviceType::CPU));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), source->nbytes(),
                                                       std::move(p), cpu_allocator(), true);
  return tensor_on(c10::Storage(std::move(storage)), c10::DispatchKey::CPU, t);
}

at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_geometry(like, t);
  return t;
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  auto keys = base.key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), keys,
                                                    like.dtype());
  copy_geometry(like, t);
  return t;
}

InlineWork::InlineWork(Stream& s) : exclusive(s.exec), no_autocast(c10::DispatchKey::AutocastCPU) { s.settle(); }

at::DataPtr take_memory(c10::StorageImpl* cpu) {
  auto& p = cpu->_mutable_data_ptr_no_checks();
  const Block* block = block_of(p);
  if (block && block->place == Place::kDevice) {
    at::DataPtr moved = std::move(p);
    moved.unsafe_set_device(kDevice);
    cpu->set_data_ptr_noswap(at::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
    return moved;
  }
  at::DataPtr copied = device_allocator().allocate(p.get() ? cpu->nbytes() : 0);
  if (p.get()) std::memcpy(copied.get(), p.get(), cpu->nbytes());
  return copied;
}

at::Tensor adopt(const at::Tensor& cpu) {
  auto* from = cpu.storage().unsafeGetStorageImpl();
  at::DataPtr memory = take_memory(from);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), from->nbytes(),
                                                       std::move(memory), &device_allocator(), true);
  return tensor_on(c10::Storage(std::move(storage)), c10::DispatchKey::PrivateUse1, cpu);
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  auto& old = storage->_mutable_data_ptr_no_checks();
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (kept) {
    Stream& s = stream(current_stream());
    Block* b = block_of(old);
    at::DataPtr grown = device_allocator().allocate(nbytes);
    if (b) {
      std::string race;
      {
        std::lock_guard<std::mutex> lock(state_mutex());
        if (auto e = b->history.record(s.epoch(Access::kRead), clock_now(s), host_clock(), 0, kept)) {
          race = "stream " + std::to_string(s.id) + " resizes a storage which " + describe(*e) +
                 ", and no wait orders the two: make stream " + std::to_string(s.id) + " wait for an event of stream " +
                 std::to_string(e->stream);
          report_race(race, false);
          forgive(s, *e);
        }
      }
      if (!race.empty()) raise_race(race);
    }
    std::lock_guard<std::recursive_mutex> lock(s.exec);
    s.settle();
    std::memcpy(grown.get(), old.get(), kept);
    storage->set_data_ptr_noswap(std::move(grown));
  } else {
    storage->set_data_ptr_noswap(device_allocator().allocate(nbytes));
  }
  storage->set_nbytes(nbytes);
}

}  // namespace hetero
