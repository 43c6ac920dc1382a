// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <charconv>
#include <map>
#include <random>
#include <utility>

#include <unistd.h>

#include <weft/base/mutex.h>
#include <weft/transport/inproc/faults.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/registry.h>
#include <weft/transport/stream/stream_connection.h>

namespace weft::transport::inproc {

namespace {

// The state of a listener, shared with the calls that connect to it.
struct OpenListener {
  std::string address;
  std::weak_ptr<EventLoop> loop;
  std::atomic<bool> is_open{true};
  std::function<void(std::shared_ptr<Connection>)> accepted;
};

// The listeners of this process. There is one table for all engines, because each engine opens the
// transport for itself.
class Listeners {
 public:
  static Listeners& of_process() {
    static auto* const places = new Listeners;  // engines may outlive static objects
    return *places;
  }
  std::uint64_t add(const std::shared_ptr<OpenListener>& place) {
    MutexLock lock(mutex_);
    places_.emplace(++last_, place);
    return last_;
  }
  void remove(std::uint64_t number) {
    MutexLock lock(mutex_);
    places_.erase(number);
  }
  std::shared_ptr<OpenListener> find(std::uint64_t number) {
    MutexLock lock(mutex_);
    const auto found = places_.find(number);
    return found == places_.end() ? nullptr : found->second;
  }
  // Differs between two machines' processes that happen to have the same process id.
  std::uint64_t nonce() const { return nonce_; }

 private:
  Listeners() {
    std::random_device random;
    nonce_ = (std::uint64_t{random()} << 32) | random();
  }
  Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<OpenListener>> places_ WEFT_GUARDED_BY(mutex_);
  std::uint64_t last_ WEFT_GUARDED_BY(mutex_) = 0;  // numbers are never reused
  std::uint64_t nonce_ = 0;
};

// Holds the function that is shown new connections.
class Shown {
 public:
  static Shown& of_process() {
    static auto* const shown = new Shown;  // engines may outlive static objects
    return *shown;
  }
  void set(std::function<void(const Faults&, const Faults&)> show) {
    MutexLock lock(mutex_);
    show_ = std::move(show);
  }
  void made(const Streams& streams) {
    MutexLock lock(mutex_);
    if (show_) show_(streams.a_to_b, streams.b_to_a);
  }

 private:
  Mutex mutex_;
  std::function<void(const Faults&, const Faults&)> show_ WEFT_GUARDED_BY(mutex_);
};

// "pid/number/nonce".
struct Address {
  std::uint64_t process = 0;
  std::uint64_t number = 0;
  std::uint64_t nonce = 0;

  bool is_here() const {
    return process == static_cast<std::uint64_t>(::getpid()) &&
           nonce == Listeners::of_process().nonce();
  }
  std::string text() const {
    return std::to_string(process) + "/" + std::to_string(number) + "/" + std::to_string(nonce);
  }
};

std::optional<Address> parse(const std::string& text) {
  Address address;
  const char* at = text.data();
  const char* const end = at + text.size();
  for (std::uint64_t* field : {&address.process, &address.number, &address.nonce}) {
    if (field != &address.process && (at == end || *at++ != '/')) return std::nullopt;
    const auto [next, error] = std::from_chars(at, end, *field);
    if (error != std::errc()) return std::nullopt;
    at = next;
  }
  return at == end ? std::optional(address) : std::nullopt;
}

class InprocListener final : public Listener {
 public:
  explicit InprocListener(const ListenOptions& options) {
    place_->loop = options.loop;
    place_->accepted = options.accepted;
    number_ = Listeners::of_process().add(place_);
    place_->address =
        Address{static_cast<std::uint64_t>(::getpid()), number_, Listeners::of_process().nonce()}
            .text();
  }
  ~InprocListener() override {
    place_->is_open = false;
    Listeners::of_process().remove(number_);
  }
  std::string address() const override { return place_->address; }

 private:
  std::shared_ptr<OpenListener> place_ = std::make_shared<OpenListener>();
  std::uint64_t number_ = 0;
};

class InprocConnector final : public Connector {
 public:
  Capabilities capabilities() const override { return inproc::capabilities(); }
  int preference() const override { return 100; }  // below shm, which connects engines too
  std::optional<std::string> why_unreachable(const std::string& address) const override {
    const auto parsed = parse(address);
    if (!parsed) return "'" + address + "' is not an inproc address";
    if (!parsed->is_here()) return "'" + address + "' is in another process";
    return std::nullopt;
  }
  std::unique_ptr<Listener> listen(const ListenOptions& options) override {
    if (!options.loop || !options.accepted)
      throw Error(Blame::Caller, "inproc listen: a loop and `accepted` must be given");
    return std::make_unique<InprocListener>(options);
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const ConnectOptions& options) override;
};

// One call of connect(). It is decided once: the listener takes its end, or the deadline passes.
struct Call {
  std::atomic<bool> is_decided{false};
  EventLoop::Registration timer;
};

// Hands the listener its end. Tells the connecting side if nobody listens any more, or if the
// listener has not accepted by the deadline.
void hand_over(const std::shared_ptr<OpenListener>& place, Streams streams, EventLoop& caller,
               Deadline deadline) {
  const auto loop = place->loop.lock();
  if (!loop) return;
  const auto call = std::make_shared<Call>();
  if (!deadline.is_never()) {
    call->timer = caller.at(deadline, [call, back = streams.b_to_a] {
      if (call->is_decided.exchange(true)) return;
      back.cut_at(
          0, Error(Blame::Timeout,
                   "the listener has not accepted by the deadline; its loop is stuck or busy"));
    });
  }
  loop->post([place, call, stream = std::move(streams.b), back = streams.b_to_a]() mutable {
    call->timer.reset();
    if (call->is_decided.exchange(true)) return;
    const auto own = place->loop.lock();
    if (own && place->is_open)
      return place->accepted(connect_over(std::move(stream), capabilities(), "inproc", own));
    back.cut_at(0, Error(Blame::PeerLost, "nobody listens there any more"));
  });
}

std::shared_ptr<Connection> InprocConnector::connect(const std::string& address,
                                                     const ConnectOptions& options) {
  static std::atomic<std::uint64_t> connections{0};
  const auto parsed = parse(address);
  if (!parsed)
    throw Error(Blame::Caller,
                "inproc connect: '" + address + "' is not an inproc address (pid/number/nonce)");
  if (!options.loop) throw Error(Blame::Caller, "inproc connect: a loop must be given");
  const std::string name = address + " connection " + std::to_string(++connections);
  Streams streams = make_streams(kRingBytes, name, address);
  Shown::of_process().made(streams);
  auto connection = connect_over(std::move(streams.a), capabilities(), "inproc", options.loop);
  if (const auto unreachable = why_unreachable(address)) {
    streams.b_to_a.cut_at(0, Error(Blame::PeerLost, *unreachable));
  } else if (const auto place = Listeners::of_process().find(parsed->number)) {
    hand_over(place, std::move(streams), *options.loop, options.deadline);
  } else {
    streams.b_to_a.cut_at(
        0,
        Error(Blame::PeerLost, "nobody listens there"));  // final, because numbers are never reused
  }
  return connection;
}

class Inproc final : public Transport {
 public:
  std::string_view name() const override { return "inproc"; }
  Connector* connector() override { return &connector_; }
  bool reaches(DeviceType type) const override { return type == DeviceType::Host; }
  std::shared_ptr<Communicator> join(const JoinOptions& options) override {
    return mesh::join(*this, options);
  }

 private:
  InprocConnector connector_;
};

}  // namespace

void on_link(std::function<void(const Faults&, const Faults&)> show) {
  Shown::of_process().set(std::move(show));
}

Result<std::shared_ptr<Transport>> open() {
  return std::shared_ptr<Transport>(std::make_shared<Inproc>());
}

}  // namespace weft::transport::inproc
