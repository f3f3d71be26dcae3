// Streams, events and the link.
//
// Owns: the stream threads, the current stream of each host thread, the clocks of streams and host, the
// link's speed, and the list of races found. Stream 0 computes inline on the calling thread; every other
// stream is a thread that runs queued copies in order. All host threads count as one host.
//
// Times are the device's: a copy begins when the link is free and what it waits for has ended, however late our thread
// wakes up to make it. Nobody sees it end before it has been made.
//
// Locks: state_mutex() guards clocks, block histories, statistics and the race list, and is held only for
// moments; Stream::exec serialises what runs inline on one stream and may be held long. Never take exec while
// holding the state mutex, and never take the GIL while holding either.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "races.h"

namespace hetero {

using TimePoint = std::chrono::steady_clock::time_point;

// The completion of everything queued on a stream up to one point.
struct Ticket {
  std::atomic<bool> done{false};
  TimePoint when{};                           // on the device; valid once done
  std::vector<std::shared_ptr<Ticket>> after;  // earlier tickets that must be complete too
  bool finished() const;
  TimePoint finished_at() const;
  void complete(TimePoint at = std::chrono::steady_clock::now());
  void wait() const;
};

struct Stream {
  const int id;
  Clock clock;                     // guarded by the state mutex
  uint64_t host_version = 0;       // the host clock last merged into ours
  std::recursive_mutex exec;
  std::atomic<bool> has_deferred{false};
  std::vector<std::shared_ptr<Ticket>> deferred;  // stream 0 only: waits to honour before the next inline work
  TimePoint reached{};  // side streams, on their own thread: when the device has done what has run so far

  explicit Stream(int id) : id(id) { clock.reached[id] = 1; }
  void enqueue(std::function<void()> job);  // side streams only
  bool idle();
  void settle();  // blocks the calling thread until everything queued here is complete
  Epoch epoch(Access kind) const { return {clock.reached[id], static_cast<int16_t>(id), kind}; }

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, started_ = false;
};

struct Event {
  std::shared_ptr<Ticket> ticket;
  Clock clock;
};

std::mutex& state_mutex();

Stream& stream(int id);
int new_stream_id();
int current_stream();
void set_current_stream(int id);
void synchronize_stream(Stream& s);
void synchronize_device();
void record_event(Event& e, Stream& s);
void wait_event(const Event& e, Stream& s);
bool query_event(const Event& e);
void synchronize_event(const Event& e);
// Compute does nothing for so long once it has come so far, as during a kernel; the caller goes on at once.
void keep_busy(double seconds);
bool query_stream(Stream& s);

// With the state mutex held:
const Clock& clock_now(Stream& s);  // the stream's clock, the host's included
const Clock& host_clock();
void host_learns(const Clock& c);  // the host has waited for everything in c
void publish(Stream& s);           // later accesses of s are no longer covered by clocks taken so far
void host_joins(Stream& s);        // the host has waited for s
// A race once reported counts as ordered, or the clean-up after the error would report it again.
void forgive(Stream& s, const Epoch& earlier);

enum class Direction { kToDevice, kToHost };
void set_link(double bytes_per_second, double seconds);
std::pair<double, double> link();
// Books nbytes, which could go from ``ready`` on, and returns when they will have arrived. Each direction has the full
// bandwidth.
TimePoint book_transfer(Direction d, size_t nbytes, TimePoint ready = std::chrono::steady_clock::now());
void sleep_until(TimePoint t);

// Races. report_race is called with the state mutex held, the rest without.
void report_race(std::string message, bool raise_later);
void raise_deferred_race();
std::vector<std::string> races();
void clear_races();
[[noreturn]] void raise_race(const std::string& message);  // as hetero.errors.StreamRaceError
std::string describe(const Epoch& e);

}  // namespace hetero
