// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <map>
#include <memory_resource>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include <climits>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/crash.h>
#include <weft/base/descriptor.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/profiling/trace/breakage.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/profiling/trace/open_ranges.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/profiling/trace/timeline_part.h>
#include <weft/profiling/trace/transports.h>

namespace weft::trace {

namespace {

class Json {
 public:
  explicit Json(std::pmr::memory_resource* memory) : text_(memory) {}
  Json& key(const char* name) {
    separate();
    timeline::append_quoted(text_, name);
    text_ += ':';
    fresh_ = true;
    return *this;
  }
  void text(std::string_view value) {
    separate();
    timeline::append_quoted(text_, value);
  }
  void number(std::int64_t value) {
    separate();
    std::array<char, 24> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    text_.append(digits.data(), end);
  }
  void open(char bracket) {
    separate();
    text_ += bracket;
    fresh_ = true;
  }
  void close(char bracket) {
    text_ += bracket;
    fresh_ = false;
  }
  void line() { text_ += '\n'; }
  std::pmr::string take() { return std::move(text_); }

 private:
  void separate() {
    if (!fresh_) text_ += ',';
    fresh_ = false;
  }
  std::pmr::string text_;
  bool fresh_ = true;
};

const char* name_of(State state) {
  switch (state) {
    case State::Open: return "open";
    case State::Done: return "done";
    case State::Failed: return "failed";
  }
  broken("no such trace::State");
}

void write(Json& json, const Record& record, int party) {
  json.open('{');
  json.key("ticket").number(static_cast<std::int64_t>(record.ticket));
  json.key("party").number(party);
  json.key("kind").text(name(record.kind));
  json.key("state").text(name_of(record.state));
  if (record.kind == Kind::Served && record.state == State::Open) {
    json.key("runs").number(record.runs ? 1 : 0);
  }
  json.key("name").text(record.name);
  json.key("sequence").number(static_cast<std::int64_t>(record.sequence));
  json.key("peer").number(record.peer);
  json.key("tag").number(record.tag);
  json.key("bytes").number(static_cast<std::int64_t>(record.bytes));
  json.key("dtype").text(record.dtype);
  json.key("shape").open('[');
  for (std::size_t i = 0; i < std::min<std::size_t>(record.dims, kMostDims); ++i)
    json.number(record.shape[i]);
  json.close(']');
  json.key("dims").number(record.dims);
  json.key("reduction").text(record.reduction);
  if (*record.called_by != '\0') json.key("called_by").text(record.called_by);
  json.key("begun").number(record.begun);
  json.key("ended").number(record.ended);
  if (record.state == State::Failed) {
    json.key("blame").text(weft::name(static_cast<Blame>(record.blame)));
    json.key("error").text(record.error.data());
  }
  json.close('}');
  json.line();
}

void write(Json& json, const Member& member, int number) {
  const MemberIdentity& party = *member.party();
  json.open('{');
  json.key("party").number(number);
  json.key("kind").text(party.kind);
  json.key("name").text(party.name);
  json.key("rank").number(party.rank);
  json.key("ranks").open('[');
  for (const int rank : party.ranks) json.number(rank);
  json.close(']');
  json.key("generation").number(member.generation());
  if (const auto transports = transports_of(member))
    json.key("transports").text(transports->data());
  if (const auto broken = breakage_of(member)) {
    json.key("broken").open('{');
    json.key("blame").text(weft::name(broken->blame));
    json.key("error").text(broken->error.data());
    json.close('}');
  }
  json.close('}');
  json.line();
}

void write(Json& json, const OpenedRange& range) {
  json.open('{');
  json.key("name").text(range.name);
  json.key("begun").number(range.begun);
  json.close('}');
}

std::int64_t wall_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::atomic<std::uint64_t> drawn{0};  // 0: not drawn yet

constexpr std::size_t kMostJobs = 64;
constinit ForkMutex joining(ForkOrder::Jobs);
auto& jobs WEFT_GUARDED_BY(joining) = *new std::deque<std::string>();  // oldest first

// A forked process takes part in no job. Runs in the child, which has one thread.
void leave_in_child() WEFT_UNCHECKED_LOCKING { jobs.clear(); }

// The text of process_identity(). Allocates nothing if this process has one.
std::array<char, 17> identity() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { drawn.store(0); });
  static_cast<void>(registered);
  if (drawn.load() == 0) {
    std::random_device random;
    std::uint64_t none = 0;
    drawn.compare_exchange_strong(none, (std::uint64_t{random()} << 32) | random() | 1);
  }
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016" PRIx64, drawn.load());
  return text;
}

const std::string& host() {
  static const auto& known = *new std::string(timeline::host_identity());
  return known;
}

// The contents of the flight recorder as JSON. Allocates only from `memory`, once host() and
// identity() are known.
std::pmr::string text_of(std::string_view reason, pid_t process,
                         std::pmr::memory_resource* memory) {
  const auto records = flight_recorder().read(memory);
  Json json(memory);
  json.open('{');
  json.key("weft").text("flight recorder 1");
  json.key("reason").text(reason);
  json.key("host").text(host());
  json.key("pid").number(process);
  json.key("process").text(identity().data());
  json.key("jobs").open('[');
  {
    MutexLock lock(joining);
    for (const std::string& id : jobs) json.text(id);
  }
  json.close(']');
  json.key("ranges").open('[');
  for (const OpenedRange& range : open_ranges(memory)) write(json, range);
  json.close(']');
  json.key("time").number(now());
  json.key("wall_clock").number(wall_clock());
  std::pmr::map<std::pair<const MemberIdentity*, std::uint32_t>, int> numbers(memory);
  json.key("parties").open('[');
  for (const Member& member : members(memory)) {
    const int number = static_cast<int>(numbers.size());
    numbers[{member.party(), member.generation()}] = number;
    write(json, member, number);
  }
  for (const Record& record : records) {
    const Member& member = record.member;
    const auto [found, is_new] = numbers.try_emplace({member.party(), member.generation()},
                                                     static_cast<int>(numbers.size()));
    if (is_new) write(json, member, found->second);
  }
  json.close(']');
  json.key("records").open('[');
  for (const Record& record : records)
    write(json, record, numbers.at({record.member.party(), record.member.generation()}));
  json.close(']');
  json.close('}');
  json.line();
  return json.take();
}

constinit ForkMutex writing(ForkOrder::Dump);
// dump_to()'s argument, which may be relative.
auto& asked WEFT_GUARDED_BY(writing) = *new std::string();
// Never destroyed: dumps are written while the process ends.
auto& folder WEFT_GUARDED_BY(writing) = *new std::string();
int written WEFT_GUARDED_BY(writing) = 0;
// Files after the first kKept, oldest first.
auto& newest WEFT_GUARDED_BY(writing) = *new std::deque<std::string>();
// The process that wrote them; a child does not remove its parent's files.
auto& written_by WEFT_GUARDED_BY(writing) = *new std::string();
// The process that installed the handler: a child has the handler, but no thread.
pid_t installed_in WEFT_GUARDED_BY(writing) = 0;
// Writing end of the pipe that the thread reads; set before the handler is installed.
int signal_end = -1;
std::atomic<bool> is_wanted{false};  // dump_to() was called
std::atomic<std::int64_t> last_dump{0};

// Writes one byte to the thread, which a signal handler may do.
void on_signal(int) {
  const int number = errno;
  [[maybe_unused]] const auto count = ::write(signal_end, "d", 1);
  errno = number;
}

// Blocks SIGUSR1 in this thread, and for good in the threads that it starts meanwhile.
class SignalBlocked {
 public:
  SignalBlocked() {
    sigset_t signal;
    ::sigemptyset(&signal);
    ::sigaddset(&signal, SIGUSR1);
    ::pthread_sigmask(SIG_BLOCK, &signal, &before_);
  }
  ~SignalBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalBlocked(const SignalBlocked&) = delete;
  SignalBlocked& operator=(const SignalBlocked&) = delete;

 private:
  sigset_t before_{};
};

bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const auto count = ::write(descriptor, text.data(), text.size());
    if (count < 0 && errno != EINTR) return false;
    if (count > 0) text.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

// Writes `text` to a new file. Returns 0, or an errno, in which case no file remains. Allocates
// nothing.
int write_file(const char* path, std::string_view text) {
  std::array<char, PATH_MAX> fresh{};
  if (std::snprintf(fresh.data(), fresh.size(), "%s.new", path) >= static_cast<int>(fresh.size()))
    return ENAMETOOLONG;
  const int descriptor = ::open(fresh.data(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) return errno;
  int number = write_all(descriptor, text) ? 0 : errno;
  if (::close(descriptor) != 0 && number == 0) number = errno;
  if (number == 0 && ::rename(fresh.data(), path) != 0) number = errno;
  if (number != 0) ::unlink(fresh.data());
  return number;
}

std::array<char, PATH_MAX> path_in(const char* where, pid_t process, int number) {
  std::array<char, PATH_MAX> path{};
  std::snprintf(path.data(), path.size(), "%s/dump-%d-%s-%d.json", where, static_cast<int>(process),
                identity().data(), number);
  return path;
}

// Makes a folder, or accepts one that belongs to this user and that no other user can write to.
void make_own(const std::string& where) {
  struct stat about {};
  const bool is_made = ::mkdir(where.c_str(), 0700) == 0;
  const bool is_own = ::lstat(where.c_str(), &about) == 0 && S_ISDIR(about.st_mode) &&
                      about.st_uid == ::geteuid() && (about.st_mode & 0022) == 0;
  if (is_made || is_own) return;
  throw Error(Blame::Caller,
              "'" + where + "' cannot be made or is another user's; set WEFT_DUMP_DIR to a folder");
}

// Keeps the first and the newest dumps: a service that fails every second would fill the disk.
constexpr std::size_t kKept = 8;  // how many first and how many newest dumps

std::string write_to(const std::string& where, const std::string& reason) {
  MutexLock lock(writing);
  const std::string process = process_identity();
  if (written_by != process) {
    written_by = process;
    written = 0;
    newest.clear();
  }
  const std::string path = path_in(where.c_str(), ::getpid(), ++written).data();
  const int failed =
      write_file(path.c_str(), text_of(reason, ::getpid(), std::pmr::get_default_resource()));
  if (failed != 0) throw system_error(Blame::Caller, "'" + path + "' cannot be written", failed);
  if (static_cast<std::size_t>(written) > kKept) newest.push_back(path);
  if (newest.size() > kKept) {
    std::remove(newest.front().c_str());
    newest.pop_front();
  }
  return path;
}

// Runs in a forked copy of the process that has crashed: uses no locks, and memory of its own
// instead of the heap.
bool dump_after_crash(const char* reason) WEFT_UNCHECKED_LOCKING {
  constexpr std::size_t kBytes = 64 << 20;  // more than all records and their texts need
  void* const place = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return false;
  std::pmr::monotonic_buffer_resource memory(place, kBytes, std::pmr::null_memory_resource());
  const pid_t crashed = ::getppid();
  return write_file(path_in(folder.c_str(), crashed, written + 1).data(),
                    text_of(reason, crashed, &memory)) == 0;
}

// Writes a dump for SIGUSR1, without the limit of one a second.
void dump_because_asked() noexcept {
  constexpr const char* kReason = "SIGUSR1";
  last_dump = 0;
  if (is_wanted.load(std::memory_order_acquire)) {
    dump_now(kReason);
    return;
  }
  try {
    const std::string where = default_folder();
    make_own(where);
    // Warns, because nobody has chosen the folder.
    log::warn("SIGUSR1: the flight recorder was written to " + write_to(where, kReason) +
              " (WEFT_DUMP_DIR chooses another folder)");
  } catch (const std::exception& error) {
    log::warn(std::string("SIGUSR1: the flight recorder was not written: ") + error.what());
  }
}

void install_signal() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw system_error(Blame::Busy, "the flight recorder's signal: pipe", errno);
  Descriptor read_end(ends[0]);
  Descriptor write_end(ends[1]);
  ::fcntl(write_end.get(), F_SETFL, O_NONBLOCK);
  try {
    // Otherwise the kernel could deliver a signal to this thread while the handler of the last one
    // still runs in another. ThreadSanitizer would then defer the handler until read() returns,
    // which never happens, because nothing else writes the byte that read() waits for.
    const SignalBlocked in_new_thread;
    std::thread([from = std::move(read_end)] {
      pthread_setname_np(pthread_self(), "weft dump");
      for (char byte = 0;;) {
        const auto count = ::read(from.get(), &byte, 1);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return;
        dump_because_asked();
      }
    }).detach();
  } catch (const std::system_error& error) {
    throw system_error(Blame::Busy,
                       "cannot start a thread for the flight recorder's signal; allow this user, "
                       "or the container, more threads (ulimit -u, pids.max)",
                       error.code().value());
  }
  signal_end = write_end.release();
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR1, &action, nullptr);
}

// Leaves the signal to a program that handles or ignores it.
void install_once() WEFT_REQUIRES(writing) {
  if (installed_in == ::getpid()) return;
  struct sigaction present {};
  if (::sigaction(SIGUSR1, nullptr, &present) != 0) return;
  const bool is_taken = (present.sa_flags & SA_SIGINFO) != 0 || present.sa_handler != SIG_DFL;
  if (is_taken && present.sa_handler != on_signal) return;
  install_signal();
  installed_in = ::getpid();
}

}  // namespace

std::string process_identity() { return identity().data(); }

std::string dump(const std::string& reason) {
  return std::string(text_of(reason, ::getpid(), std::pmr::get_default_resource()));
}

void joined_job(const std::string& id) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, leave_in_child);
  static_cast<void>(registered);
  MutexLock lock(joining);
  std::erase(jobs, id);  // several ranks of the job may be threads of this process
  jobs.push_back(id);
  if (jobs.size() > kMostJobs) jobs.pop_front();
}

void dump_to(const std::string& where) {
  MutexLock lock(writing);
  if (asked == where && installed_in == ::getpid()) return;
  std::error_code failure;
  const std::string place = asked == where ? folder : std::filesystem::absolute(where).string();
  std::filesystem::create_directories(place, failure);
  if (failure)
    throw Error(Blame::Caller,
                "WEFT_DUMP_DIR is '" + where + "', which cannot be made: " + failure.message());
  asked = where;
  folder = place;  // absolute, because the process may change its folder
  host();          // a process that has crashed cannot find it out
  identity();
  crash::at_crash(dump_after_crash);
  is_wanted.store(true, std::memory_order_release);
  install_once();
}

void dump_on_signal() {
  MutexLock lock(writing);
  install_once();
}

std::string default_folder() {
  std::error_code ignored;
  const auto temporary = std::filesystem::temp_directory_path(ignored);
  return (ignored ? std::filesystem::path("/tmp") : temporary) /
         ("weft-" + std::to_string(::geteuid()));
}

std::string dump_now(const std::string& reason) noexcept {
  constexpr std::int64_t kPause = 1'000'000'000;
  if (!is_wanted.load(std::memory_order_acquire)) return "";
  const std::int64_t time = now();
  std::int64_t before = last_dump.load();
  if (before != 0 && time - before < kPause) return "";
  if (!last_dump.compare_exchange_strong(before, time)) return "";
  try {
    std::string where;
    {
      MutexLock lock(writing);
      where = folder;
    }
    const std::string path = write_to(where, reason);
    log::info("flight recorder written to " + path + ": " + reason);
    return path;
  } catch (const std::exception& error) {
    log::warn(std::string("the flight recorder was not written: ") + error.what());
    return "";
  }
}

void dump_after(const std::string& what, const Error& error) noexcept {
  if (error.blame() == Blame::Cancelled) return;
  try {
    dump_now(what + ": " + error.text());
  } catch (const std::bad_alloc&) {
    dump_now("");
  }
}

bool is_worth_a_dump(const Error& error) noexcept {
  const Blame blame = error.blame();
  return blame == Blame::Timeout || ends_connection(blame) || blame == Blame::Device;
}

}  // namespace weft::trace
