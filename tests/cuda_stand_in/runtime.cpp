// The CUDA runtime of one device that does not exist: its memory is the host's, and its streams are queues.
//
// A task of a stream (a copy, a fill, an event, a wait) is done as late as it may be: when somebody waits for it, or
// for what comes after it. So a wait that is missing shows as wrong numbers, every time, and not as luck. Who only asks
// (a query) is told "not ready" of what was queued within the last milliseconds, and one task is done, so that asking
// again and again ends.
//
// No kernel can be launched: operators are given kernels of the host (kernels.cpp), which synchronize their stream and
// then compute at once. What torch links to and is not here is generated, and aborts with its name (build.py).
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLate = std::chrono::milliseconds(2);
constexpr size_t kPoisoned = size_t{64} << 20;  // larger memory is left as it is: to touch it would use the host's

// Everything is under one lock. A task may need another stream's tasks, and so on.
std::recursive_mutex& lock() {
  static auto* m = new std::recursive_mutex;
  return *m;
}
using Guard = std::lock_guard<std::recursive_mutex>;

struct Task {
  std::function<void()> run;
  Clock::time_point queued;
};

struct Stream {
  std::deque<Task> tasks;
  uint64_t done = 0;
  int priority = 0;
  uint64_t queued() const { return done + tasks.size(); }
  void do_one() {
    auto task = std::move(tasks.front());
    tasks.pop_front();
    task.run();
    ++done;
  }
  void do_until(uint64_t count) {
    while (done < count && !tasks.empty()) do_one();
  }
};

// A place in a stream, and when the stream came there.
struct Ticket {
  Stream* stream;
  uint64_t count;
  Clock::time_point when{};
  bool passed() const { return stream->done >= count; }
};

struct Event {
  std::shared_ptr<Ticket> ticket;  // of the last record; none: as if it had passed
};

size_t total_bytes() {
  static const size_t bytes = [] {
    const char* mib = std::getenv("CUDA_STAND_IN_MIB");
    return (mib ? std::strtoull(mib, nullptr, 10) : 8192) << 20;
  }();
  return bytes;
}

struct Device {
  size_t used = 0;
  std::map<const char*, size_t> memory, pinned;  // by where it begins
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  Stream null;
};

Device& device() {
  static auto* d = new Device;  // torch frees after static destructors have run
  return *d;
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }

Stream& of(cudaStream_t s) {
  const auto value = reinterpret_cast<uintptr_t>(s);
  return value <= 2 ? device().null : *reinterpret_cast<Stream*>(s);  // legacy and per-thread have names as well
}

Event& of(cudaEvent_t e) { return *reinterpret_cast<Event*>(e); }

void synchronize_all() {
  auto& d = device();
  d.null.do_until(d.null.queued());
  for (auto& [key, stream] : d.streams) stream->do_until(stream->queued());
}

bool within(const std::map<const char*, size_t>& ranges, const void* p) {
  auto it = ranges.upper_bound(static_cast<const char*>(p));
  if (it == ranges.begin()) return false;
  --it;
  return static_cast<const char*>(p) < it->first + it->second;
}

// The device reads and writes it while the host goes on.
bool is_reachable(const void* p) { return within(device().memory, p) || within(device().pinned, p); }

cudaError_t queue(cudaStream_t s, std::function<void()> task, bool now) {
  Stream& stream = of(s);
  stream.tasks.push_back({std::move(task), Clock::now()});
  if (now) stream.do_until(stream.queued());
  return cudaSuccess;
}

cudaError_t ask(Stream& stream, uint64_t count) {
  while (stream.done < count && Clock::now() - stream.tasks.front().queued > kLate) stream.do_one();
  if (stream.done >= count) return cudaSuccess;
  stream.do_one();
  return cudaErrorNotReady;  // which is nobody's error
}

// A child of a process that has used the device has none.
bool is_used = false, is_forked = false;
const int forks = pthread_atfork(nullptr, nullptr, [] { is_forked = is_used; });

}  // namespace

extern "C" {

// --- the device ---

cudaError_t cudaGetDeviceCount(int* count) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  *count = visible && !*visible ? 0 : 1;
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* index) {
  if (is_forked) return fail(cudaErrorInitializationError);
  return *index = 0, cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  if (is_forked) return fail(cudaErrorInitializationError);
  return index == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { return *least = 0, *most = -5, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int index) {
  if (index != 0) return fail(cudaErrorInvalidDevice);
  *p = {};
  std::strcpy(p->name, "CUDA stand-in");
  for (int i = 0; i < 16; ++i) p->uuid.bytes[i] = static_cast<char>(i + 1);
  p->totalGlobalMem = total_bytes();
  p->major = 9, p->minor = 0;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = p->sharedMemPerMultiprocessor = 227 << 10;
  p->l2CacheSize = 50 << 20;
  p->asyncEngineCount = 2;
  p->unifiedAddressing = p->concurrentKernels = p->streamPrioritiesSupported = 1;
  p->hostRegisterSupported = p->canUseHostPointerForRegisteredMem = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 0, cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  std::strncpy(id, "0000:01:00.0", length);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Guard guard(lock());
  synchronize_all();
  return cudaSuccess;
}

// --- errors ---

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an error of the stand-in";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorNotSupported: return "the stand-in launches no kernels: this operator has none of the host";
    case cudaErrorNotReady: return "device not ready";
    default: return "an error of the stand-in";
  }
}

// --- memory ---

cudaError_t cudaMalloc(void** p, size_t size) {
  Guard guard(lock());
  is_used = true;
  auto& d = device();
  if (d.used + size > total_bytes()) return fail(cudaErrorMemoryAllocation);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  std::memset(memory, 0xFF, std::min(size, kPoisoned));  // NaN
  d.memory[static_cast<char*>(memory)] = size;
  d.used += size;
  *p = memory;
  return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  Guard guard(lock());
  synchronize_all();
  auto& d = device();
  auto it = d.memory.find(static_cast<char*>(p));
  if (it == d.memory.end()) return fail(cudaErrorInvalidValue);
  munmap(p, it->second);
  d.used -= it->second;
  d.memory.erase(it);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Guard guard(lock());
  *total = total_bytes();
  *free = *total - device().used;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** p, size_t size, unsigned) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  Guard guard(lock());
  device().pinned[static_cast<char*>(memory)] = size;
  *p = memory;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* p) {
  Guard guard(lock());
  auto it = device().pinned.find(static_cast<char*>(p));
  if (it == device().pinned.end()) return fail(cudaErrorInvalidValue);
  munmap(p, it->second);
  device().pinned.erase(it);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* p, size_t size, unsigned) {
  Guard guard(lock());
  auto& pinned = device().pinned;
  auto* begin = static_cast<char*>(p);
  auto next = pinned.lower_bound(begin);
  if (within(pinned, p) || (next != pinned.end() && next->first < begin + size))
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned[begin] = size;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* p) {
  Guard guard(lock());
  return device().pinned.erase(static_cast<char*>(p)) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Guard guard(lock());
  *a = {};
  a->device = -1;
  a->hostPointer = const_cast<void*>(p);
  if (!is_reachable(p)) return cudaSuccess;
  a->type = within(device().memory, p) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  a->device = 0;
  a->devicePointer = const_cast<void*>(p);
  if (a->type == cudaMemoryTypeDevice) a->hostPointer = nullptr;
  return cudaSuccess;
}

// --- copies: with memory of the host that is not pinned, they are over when the call returns ---

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t s) {
  Guard guard(lock());
  return queue(s, [=] { std::memcpy(to, from, size); }, !is_reachable(to) || !is_reachable(from));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  Guard guard(lock());
  return queue(nullptr, [=] { std::memcpy(to, from, size); }, true);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t s) {
  Guard guard(lock());
  return queue(s, [=] { std::memset(to, value, size); }, false);
}

cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }

// --- streams and events ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  Guard guard(lock());
  auto stream = std::make_unique<Stream>();
  stream->priority = priority;
  *s = reinterpret_cast<cudaStream_t>(stream.get());
  device().streams[stream.get()] = std::move(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {  // events may still name it: it stays
  Guard guard(lock());
  of(s).do_until(of(s).queued());
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) { return *priority = of(s).priority, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  Guard guard(lock());
  of(s).do_until(of(s).queued());
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
  Guard guard(lock());
  return ask(of(s), of(s).queued());
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  return *e = reinterpret_cast<cudaEvent_t>(new Event), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t e) {
  if (is_forked) return fail(cudaErrorInitializationError);
  Guard guard(lock());
  delete &of(e);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  Guard guard(lock());
  Stream& stream = of(s);
  auto ticket = std::make_shared<Ticket>(Ticket{&stream, stream.queued() + 1});
  of(e).ticket = ticket;
  // On a stream that has nothing to do, it has passed: the time is that of now.
  return queue(s, [ticket] { ticket->when = Clock::now(); }, stream.tasks.empty());
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  Guard guard(lock());
  auto ticket = of(e).ticket;
  if (!ticket || ticket->passed()) return cudaSuccess;
  return queue(s, [ticket] { ticket->stream->do_until(ticket->count); }, false);
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  Guard guard(lock());
  if (auto ticket = of(e).ticket) ticket->stream->do_until(ticket->count);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
  Guard guard(lock());
  auto ticket = of(e).ticket;
  return ticket ? ask(*ticket->stream, ticket->count) : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  Guard guard(lock());
  auto from = of(begin).ticket, to = of(end).ticket;
  if (!from || !to) return fail(cudaErrorInvalidResourceHandle);
  if (!from->passed() || !to->passed()) return fail(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(to->when - from->when).count();
  return cudaSuccess;
}

// --- kernels: torch's own are registered when its libraries are loaded, and never run ---

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return fail(cudaErrorNotSupported);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return fail(cudaErrorNotSupported);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return fail(cudaErrorNotSupported); }

// Of the driver, torch wants functions for memory that grows in place and for other processes: nobody calls them here.
void stand_in_missing(const char* name) {
  std::fprintf(stderr, "the CUDA stand-in has no %s\n", name);
  std::abort();
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(+[] { stand_in_missing("function of the driver"); });
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
int cuptiGetResultString(int, const char** text) { return *text = "the stand-in has no CUPTI", 0; }
size_t cudnnGetVersion() { return 91900; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }

// --- NVML: what hetero asks of it, and torch for the message of an out-of-memory error ---

int nvmlInit_v2() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "an error of the stand-in"; }
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** handle) { return *handle = &device(), 0; }
int nvmlDeviceGetHandleByUUID(const char*, void** handle) { return *handle = &device(), 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) { return *handle = &device(), 0; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }  // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  std::strncpy(version, "stand-in", length);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void*, unsigned long long info[3]) {
  size_t free, total;
  cudaMemGetInfo(&free, &total);
  info[0] = total, info[1] = free, info[2] = total - free;
  return 0;
}

}  // extern "C"
