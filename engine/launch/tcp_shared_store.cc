// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/engine/launch/signals.h>
#include <weft/engine/launch/tcp_shared_store.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/tcp_store.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::launch {

namespace {

constexpr auto kLongestCall = std::chrono::seconds(30);
constexpr const char* kState = "state";

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string describe_endpoint(const Options& options) {
  const bool is_v6 = options.endpoint_host.find(':') != std::string::npos;
  return (is_v6 ? "[" + options.endpoint_host + "]" : options.endpoint_host) + ":" +
         std::to_string(options.endpoint_port);
}

// Runs the calls of a store, one after another, on a thread of its own: c10d waits for an answer
// without a limit, also for that of a machine that has stopped or is cut off. After a call without
// an answer the store is lost, and the thread is abandoned.
class StoreThread {
 public:
  StoreThread() {
    try {
      thread_ = std::thread([queue = queue_] { run_calls(*queue); });
    } catch (const std::system_error& error) {
      throw system_error(Blame::Busy,
                         "starting the thread that asks the rendezvous; allow this user, or the "
                         "container, more threads (ulimit -u, pids.max)",
                         error.code().value());
    }
  }
  ~StoreThread() {
    {
      MutexLock lock(queue_->mutex);
      queue_->ends = true;
    }
    queue_->wakes.notify_all();
    queue_->is_lost ? thread_.detach() : thread_.join();
  }
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  // Returns or throws what `call` does. Waits for kLongestCall, but only for kLongestAtEnd once a
  // signal ends the job. `call` must own what it uses.
  template <class Call>
  std::invoke_result_t<Call> run(Call call) {
    auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Call>()>>(std::move(call));
    auto result = task->get_future();
    {
      MutexLock lock(queue_->mutex);
      queue_->calls.emplace_back([task] { (*task)(); });
    }
    queue_->wakes.notify_all();
    Deadline deadline = Deadline::in(kLongestCall);
    for (bool is_at_end = false; result.wait_for(kBetweenLooks) != std::future_status::ready;) {
      if (!is_at_end && received_signal != 0) {
        is_at_end = true;
        deadline = Deadline::sooner(deadline, Deadline::in(kLongestAtEnd));
      }
      if (deadline.passed()) queue_->is_lost = true;
      if (queue_->is_lost) throw std::runtime_error("it does not answer");
    }
    return result.get();
  }

 private:
  static constexpr auto kLongestAtEnd = std::chrono::seconds(1);
  static constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

  struct Queue {
    Mutex mutex;
    std::condition_variable wakes;
    std::deque<std::function<void()>> calls WEFT_GUARDED_BY(mutex);
    bool ends WEFT_GUARDED_BY(mutex) = false;
    std::atomic<bool> is_lost{false};
  };

  static void run_calls(Queue& queue) {
    UniqueLock lock(queue.mutex);
    for (;;) {
      queue.wakes.wait(
          lock, [&]() WEFT_REQUIRES(queue.mutex) { return queue.ends || !queue.calls.empty(); });
      if (queue.ends) return;
      const std::function<void()> call = std::move(queue.calls.front());
      queue.calls.pop_front();
      lock.unlock();
      call();
      lock.lock();
    }
  }

  // The abandoned thread uses it too.
  const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

class TcpSharedStore final : public SharedStore {
 public:
  TcpSharedStore(const c10::intrusive_ptr<c10d::Store>& store, const std::string& run_id,
                 std::string where, bool is_host)
      : store_(c10::make_intrusive<c10d::PrefixStore>("weft-run/" + run_id, store)),
        where_(std::move(where)),
        is_host_(is_host) {}

  std::string get() override {
    return call([store = store_, is_there = is_there_] {
      // get() would block until the value exists.
      if (!*is_there && !store->check({kState})) return std::string();
      *is_there = true;
      return text_of(store->get(kState));
    });
  }
  std::string compare_set(const std::string& expected, const std::string& desired) override {
    return call([store = store_, expected, desired] {
      return text_of(store->compareSet(kState, bytes_of(expected), bytes_of(desired)));
    });
  }
  void beat(const std::string& id) override {
    call([store = store_, key = key_of(id)] { return store->add(key, 1); });
  }
  std::vector<std::int64_t> beats(const std::vector<std::string>& ids) override {
    return call([store = store_, ids] {
      std::vector<std::int64_t> counts;
      for (const std::string& id : ids) counts.push_back(store->add(key_of(id), 0));
      return counts;
    });
  }
  bool is_hosted_here() const override { return is_host_; }

 private:
  static std::string key_of(const std::string& id) { return "beats/" + id; }

  template <class Call>
  std::invoke_result_t<Call> call(Call call) {
    try {
      return thread_.run(std::move(call));
    } catch (const std::exception& error) {
      throw Error(Blame::PeerLost,
                  "the rendezvous at " + where_ +
                      " is lost (the weft-run there must live as long as the job): " +
                      tensor::text_of(error));
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string where_;
  const bool is_host_;
  const std::shared_ptr<std::atomic<bool>> is_there_ = std::make_shared<std::atomic<bool>>(false);
  StoreThread thread_;
};

// Listens only on IPv4 if the host has only IPv4 addresses: c10d looks up a name for each address
// that connects, see rendezvous/rendezvous.cc. A kernel may lack IPv6 although names have such
// addresses.
Descriptor open_listener(const Options& options) {
  if (!group::is_ipv4_only(options.endpoint_host)) {
    try {
      return group::open_listener(AF_INET6, options.endpoint_port);
    } catch (const Error& error) {
      if (error.native_code() == EADDRINUSE) throw;
    }
  }
  return group::open_listener(AF_INET, options.endpoint_port);
}

// Returns null if another process listens there already: another weft-run of this machine.
c10::intrusive_ptr<c10d::Store> host_store(const Options& options) {
  try {
    Descriptor socket = open_listener(options);
    c10d::TCPStoreOptions made;
    made.port = static_cast<std::uint16_t>(options.endpoint_port);
    made.isServer = true;
    made.waitWorkers = false;
    made.timeout = kLongestCall;
    made.masterListenFd = socket.release();  // the store closes the socket
    const group::BriskLookups brisk;
    return c10::make_intrusive<c10d::TCPStore>(options.endpoint_host, made);
  } catch (const Error& error) {
    if (error.native_code() != EADDRINUSE)
      throw error.within("hosting the rendezvous at " + describe_endpoint(options));
    return nullptr;
  }
}

// Returns null if nothing listens by `soon`, unless `soon` is the deadline, or if the listener has
// closed since.
c10::intrusive_ptr<c10d::Store> join_store(const Options& options, Deadline soon,
                                           Deadline deadline) {
  std::string found;
  try {
    found = group::wait_for_listener(options.endpoint_host, options.endpoint_port, soon);
  } catch (const Error& error) {
    if (soon.point() == deadline.point() || error.blame() != Blame::Timeout) throw;
    return nullptr;
  }
  try {
    return group::connect_to_store(found, options.endpoint_port, kLongestCall, deadline);
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    if (deadline.passed()) throw;
    return nullptr;
  }
}

// A random time, so that two weft-runs of one machine do not retry in step.
std::chrono::milliseconds a_moment() {
  std::random_device random;
  return std::chrono::milliseconds(std::uniform_int_distribution(100, 400)(random));
}

}  // namespace

OpenedStore open_tcp_store(const Options& options) {
  // c10d would log stack traces if the host is lost; weft-run reports that itself.
  FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  const std::string where = describe_endpoint(options);
  const Deadline deadline = Deadline::in(options.rendezvous.join_timeout);
  try {
    group::wait_for_name(options.endpoint_host, deadline);
    const bool may_host = options.is_host.value_or(group::is_this_machine(options.endpoint_host));
    c10::intrusive_ptr<c10d::Store> store;
    bool is_host = false;
    while (!store) {
      if (may_host) store = host_store(options);
      is_host = store != nullptr;
      if (is_host) break;
      // If two processes start to listen at the same time, the kernel may refuse both: then nothing
      // answers, and both try again.
      const Deadline soon =
          may_host ? Deadline::sooner(deadline, Deadline::in(a_moment())) : deadline;
      store = join_store(options, soon, deadline);
    }
    // Other nodes reach the host of the store by the endpoint's name, and each other node by the
    // address from which it reaches the store.
    std::string address = options.local_address;
    if (address.empty() && is_host) address = options.endpoint_host;
    if (address.empty())
      address = group::address_for_others(options.endpoint_host, options.endpoint_port);
    return {std::make_shared<TcpSharedStore>(store, options.run_id, where, is_host), address};
  } catch (const Error& error) {
    throw error.within("no rendezvous at " + where);
  } catch (const std::exception& error) {
    throw Error(Blame::PeerLost, "no rendezvous at " + where + ": " + tensor::text_of(error));
  }
}

}  // namespace weft::launch
