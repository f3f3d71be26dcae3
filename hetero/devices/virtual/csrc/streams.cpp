// Owns stream threads, tickets, clocks, the link and the race list; see streams.h for the rules.
#include "streams.h"

#include <sys/prctl.h>

#include <cmath>
#include <thread>

namespace hetero {
namespace {

// Everything here is leaked on purpose: stream threads may outlive static destruction.
struct Global {
  std::mutex state;
  std::array<std::atomic<Stream*>, kMaxStreams> streams{};
  std::atomic<int> next_stream{0};
  Clock host;
  uint64_t host_version = 1;
  std::mutex completion_mutex;
  std::condition_variable completion;
  std::mutex link_mutex;
  double bandwidth = 4.0 * (1ull << 30), latency = 10e-6;
  TimePoint link_free[2]{};
  std::vector<std::string> races;
  std::string deferred_race;
  std::atomic<bool> has_deferred_race{false};
};

Global& global() {
  static Global* g = new Global;
  return *g;
}

thread_local int tls_stream = 0;

}  // namespace

std::mutex& state_mutex() { return global().state; }

// --- tickets ---

bool Ticket::finished() const {
  for (const auto& t : after)
    if (!t->finished()) return false;
  return done.load(std::memory_order_acquire);
}

TimePoint Ticket::finished_at() const {
  TimePoint latest = when;
  for (const auto& t : after) latest = std::max(latest, t->finished_at());
  return latest;
}

void Ticket::complete(TimePoint at) {
  when = at;
  {
    std::lock_guard<std::mutex> lock(global().completion_mutex);
    done.store(true, std::memory_order_release);
  }
  global().completion.notify_all();
}

void Ticket::wait() const {
  for (const auto& t : after) t->wait();
  if (done.load(std::memory_order_acquire)) return;
  std::unique_lock<std::mutex> lock(global().completion_mutex);
  global().completion.wait(lock, [&] { return done.load(); });
}

// --- streams ---

void Stream::run() {
  prctl(PR_SET_TIMERSLACK, 1000ul);  // simulated latencies are microseconds
  for (;;) {
    std::function<void()> job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [&] { return !queue_.empty(); });
      job = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    job();
    job = nullptr;  // its captures may free memory: before anybody sees us idle
    {
      std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
      if (!queue_.empty()) continue;
    }
    idle_.notify_all();
  }
}

void Stream::enqueue(std::function<void()> job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    queue_.push_back(std::move(job));
  }
  work_.notify_one();
}

bool Stream::idle() {
  if (id == 0) {
    std::lock_guard<std::mutex> lock(state_mutex());
    return std::all_of(deferred.begin(), deferred.end(), [](const auto& t) { return t->finished(); });
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::settle() {
  if (id != 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [&] { return queue_.empty() && !busy_; });
    return;
  }
  if (!has_deferred.load(std::memory_order_acquire)) return;
  std::vector<std::shared_ptr<Ticket>> waits;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    waits = deferred;
  }
  for (const auto& t : waits) t->wait();
  std::lock_guard<std::mutex> lock(state_mutex());
  deferred.erase(std::remove_if(deferred.begin(), deferred.end(), [](const auto& t) { return t->finished(); }),
                 deferred.end());
  has_deferred.store(!deferred.empty(), std::memory_order_release);
}

Stream& stream(int id) {
  auto& slot = global().streams[id];
  if (Stream* s = slot.load(std::memory_order_acquire)) return *s;
  std::lock_guard<std::mutex> lock(state_mutex());
  Stream* s = slot.load(std::memory_order_relaxed);
  if (!s) slot.store(s = new Stream(id), std::memory_order_release);
  return *s;
}

int new_stream_id() { return 1 + global().next_stream++ % (kMaxStreams - 1); }
int current_stream() { return tls_stream; }
void set_current_stream(int id) { tls_stream = id; }

void synchronize_stream(Stream& s) {
  raise_deferred_race();
  s.settle();
  std::lock_guard<std::mutex> lock(state_mutex());
  host_joins(s);
}

void synchronize_device() {
  raise_deferred_race();
  for (auto& slot : global().streams) {
    Stream* s = slot.load(std::memory_order_acquire);
    if (!s) continue;
    s->settle();
    std::lock_guard<std::mutex> lock(state_mutex());
    host_joins(*s);
  }
}

bool query_stream(Stream& s) {
  if (!s.idle()) return false;
  std::lock_guard<std::mutex> lock(state_mutex());
  host_joins(s);
  return true;
}

// --- events ---

void record_event(Event& e, Stream& s) {
  auto ticket = std::make_shared<Ticket>();
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    e.clock = clock_now(s);
    publish(s);
    e.ticket = ticket;
    if (s.id == 0) ticket->after = s.deferred;
  }
  const TimePoint called = std::chrono::steady_clock::now();
  if (s.id == 0) {
    ticket->complete(called);  // inline work is done; only the waits it is queued behind remain
  } else {
    s.enqueue([ticket, called, &s] { ticket->complete(std::max(called, s.reached)); });
  }
}

void wait_event(const Event& e, Stream& s) {
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    s.clock.merge(e.clock);
    if (e.ticket->finished()) return;
    if (s.id == 0) {
      s.deferred.push_back(e.ticket);
      s.has_deferred.store(true, std::memory_order_release);
      return;
    }
  }
  s.enqueue([ticket = e.ticket, &s] {
    ticket->wait();
    s.reached = std::max(s.reached, ticket->finished_at());
  });
}

void keep_busy(double seconds) {
  using namespace std::chrono;
  // A thread that only waits and sleeps. It is no stream: it touches no memory, so it needs no clock.
  static Stream* sleeper = new Stream(0);
  auto ticket = std::make_shared<Ticket>();
  const TimePoint called = steady_clock::now();
  Stream& s = stream(0);
  std::vector<std::shared_ptr<Ticket>> after;
  {
    std::lock_guard<std::mutex> lock(state_mutex());
    after = s.deferred;
    s.deferred.push_back(ticket);
    s.has_deferred.store(true, std::memory_order_release);
  }
  sleeper->enqueue([ticket, after = std::move(after), called, seconds] {
    TimePoint begin = called;
    for (const auto& t : after) {
      t->wait();
      begin = std::max(begin, t->finished_at());
    }
    const TimePoint end = begin + duration_cast<TimePoint::duration>(duration<double>(seconds));
    std::this_thread::sleep_until(end);
    ticket->complete(end);
  });
}

bool query_event(const Event& e) {
  if (!e.ticket->finished()) return false;
  std::lock_guard<std::mutex> lock(state_mutex());
  host_learns(e.clock);
  return true;
}

void synchronize_event(const Event& e) {
  raise_deferred_race();
  e.ticket->wait();
  std::lock_guard<std::mutex> lock(state_mutex());
  host_learns(e.clock);
}

// --- clocks ---

const Clock& clock_now(Stream& s) {
  if (s.host_version != global().host_version) {
    s.clock.merge(global().host);
    s.host_version = global().host_version;
  }
  return s.clock;
}

const Clock& host_clock() { return global().host; }

void host_learns(const Clock& c) {
  global().host.merge(c);
  ++global().host_version;
}

void publish(Stream& s) { ++s.clock.reached[s.id]; }

void host_joins(Stream& s) {
  host_learns(clock_now(s));
  publish(s);
}

void forgive(Stream& s, const Epoch& earlier) {
  s.clock.reached[earlier.stream] = std::max(s.clock.reached[earlier.stream], earlier.time);
  publish(*global().streams[earlier.stream].load());
}

// --- link ---

void set_link(double bytes_per_second, double seconds) {
  std::lock_guard<std::mutex> lock(global().link_mutex);
  global().bandwidth = bytes_per_second;
  global().latency = seconds;
}

std::pair<double, double> link() {
  std::lock_guard<std::mutex> lock(global().link_mutex);
  return {global().bandwidth, global().latency};
}

TimePoint book_transfer(Direction d, size_t nbytes, TimePoint ready) {
  using Seconds = std::chrono::duration<double>;
  auto ticks = [](double s) { return std::chrono::duration_cast<TimePoint::duration>(Seconds(std::min(s, 1e9))); };
  std::lock_guard<std::mutex> lock(global().link_mutex);
  auto& free_at = global().link_free[static_cast<int>(d)];
  free_at = std::max(free_at, ready) + ticks(nbytes / global().bandwidth);
  return free_at + ticks(global().latency);
}

void sleep_until(TimePoint t) {
  using namespace std::chrono;
  // A host thread's timer slack is 50 us: sleep short of the goal and yield through the rest.
  auto margin = microseconds(60);
  if (t - steady_clock::now() > margin) std::this_thread::sleep_until(t - margin);
  while (steady_clock::now() < t) std::this_thread::yield();
}

// --- races ---

std::string describe(const Epoch& e) {
  const char* verb = e.kind == Access::kRead ? " reads" : e.kind == Access::kAllocate ? " allocated" : " writes";
  return "stream " + std::to_string(e.stream) + verb;
}

void report_race(std::string message, bool raise_later) {
  auto& g = global();
  constexpr size_t kKept = 1000;  // a loop that races must not eat the memory
  if (raise_later && !g.has_deferred_race) {
    g.deferred_race = message;
    g.has_deferred_race = true;
  }
  if (g.races.size() < kKept) g.races.push_back(std::move(message));
}

void raise_deferred_race() {
  auto& g = global();
  if (!g.has_deferred_race.load(std::memory_order_relaxed)) return;
  std::string message;
  {
    std::lock_guard<std::mutex> lock(g.state);
    if (!g.has_deferred_race.exchange(false)) return;
    message = std::move(g.deferred_race);
  }
  raise_race(message);
}

std::vector<std::string> races() {
  std::lock_guard<std::mutex> lock(state_mutex());
  global().has_deferred_race = false;
  return global().races;
}

void clear_races() {
  std::lock_guard<std::mutex> lock(state_mutex());
  global().has_deferred_race = false;
  global().races.clear();
}

}  // namespace hetero
