// SPDX-License-Identifier: Apache-2.0
// Ranks of a mesh that are threads of the test, over inproc; and a scripted rank.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <gmock/gmock.h>

#include <weft/base/loop_flag.h>
#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/mesh/table.h>
#include <weft/transport/transport.h>

namespace weft::transport::inproc {
Result<std::shared_ptr<Transport>>
open();  // declared here because the registry's table would link every other backend
}

namespace weft::transport::mesh {

inline Deadline soon() { return Deadline::in(std::chrono::seconds(60)); }
constexpr auto kTimeout = std::chrono::milliseconds(60'000);

inline JoinOptions options_of(int rank, int size, const std::shared_ptr<Bootstrap>& store,
                              std::chrono::milliseconds timeout = kTimeout) {
  JoinOptions options;
  options.rank = rank;
  options.size = size;
  options.group_name = "test";
  options.store = store;
  options.timeout = timeout;
  options.loop = std::make_shared<EventLoop>("rank " + std::to_string(rank));
  return options;
}

inline std::shared_ptr<Communicator> join_inproc(const JoinOptions& options) {
  return inproc::open().value()->join(options);
}

// The connections of inproc, as if each process were on the host with this name.
class OnHost final : public Connector {
 public:
  explicit OnHost(std::string host) : host_(std::move(host)) {}

  Capabilities capabilities() const override { return inner().capabilities(); }
  int preference() const override { return inner().preference(); }
  std::optional<std::string> why_unreachable(const std::string& address) const override {
    return inner().why_unreachable(inner_of(address));
  }
  std::string host_of(const std::string& address) const override {
    return address.substr(0, address.find(' '));
  }
  std::unique_ptr<Listener> listen(const ListenOptions& options) override {
    return std::make_unique<Named>(host_, inner().listen(options));
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const ConnectOptions& options) override {
    return inner().connect(inner_of(address), options);
  }

 private:
  class Named final : public Listener {
   public:
    Named(std::string host, std::unique_ptr<Listener> inner)
        : host_(std::move(host)), inner_(std::move(inner)) {}
    std::string address() const override { return host_ + " " + inner_->address(); }

   private:
    const std::string host_;
    const std::unique_ptr<Listener> inner_;
  };
  static std::string inner_of(const std::string& address) {
    return address.substr(address.find(' ') + 1);
  }
  Connector& inner() const { return *transport_->connector(); }

  const std::string host_;
  const std::shared_ptr<Transport> transport_ = inproc::open().value();
};

using Join = std::function<std::shared_ptr<Communicator>(const JoinOptions&)>;

// Runs the body on a thread for each rank. No rank leaves before all bodies have returned.
inline void run_ranks(int ranks, const std::function<void(Communicator&)>& body,
                      std::chrono::milliseconds timeout = kTimeout,
                      const Join& join = join_inproc) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto communicator = join(options_of(rank, ranks, store, timeout));
        body(*communicator);
        store->set("end/" + std::to_string(rank), {});
        for (int other = 0; other < ranks; ++other)
          store->get("end/" + std::to_string(other), soon());
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
        store->set("end/" + std::to_string(rank), {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The same with ranks that lie on these hosts.
inline void run_ranks_on(const std::vector<int>& hosts,
                         const std::function<void(Communicator&)>& body) {
  run_ranks(static_cast<int>(hosts.size()), body, kTimeout, [&](const JoinOptions& options) {
    const int host = hosts[static_cast<std::size_t>(options.rank)];
    return mesh::join(std::make_shared<OnHost>(std::to_string(host)), "inproc", options,
                      [](const std::string&) { return Chooser(choose); });
  });
}

inline void expect_done(const Op& op, const std::string& what) {
  ASSERT_TRUE(op.done().synchronize(soon())) << what << " does not end";
  const auto error = op.error();
  ASSERT_FALSE(error) << what << ": " << error->what();
}

inline Error expect_failed(const Op& op, const std::string& what) {
  EXPECT_TRUE(op.done().synchronize(soon())) << what << " failed, but its fence does not pass";
  const auto error = op.error();
  EXPECT_TRUE(error) << what << " did not fail";
  return error.value_or(Error(Blame::Remote, "no error"));
}

template <class T>
Elements elements_of(std::vector<T>& data, Dtype dtype) {
  return {{data.data(), data.size() * sizeof(T), Device::host()}, dtype};
}

// Rank 1 of two, scripted: it may send invalid messages.
class ScriptedPeer {
 public:
  struct Seen {
    Message message;
    std::vector<std::byte> payload;
  };

  explicit ScriptedPeer(std::shared_ptr<Bootstrap> store) : store_(std::move(store)) {}
  ~ScriptedPeer() { close(); }

  // Publishes its address, where it takes connections and sends nothing, and reads rank 0's.
  void meet() {
    store_->set("mesh/address/1", encode_address(listener_->address()));
    const auto table = decode_table(store_->get("mesh/table", soon()), 2);
    ASSERT_TRUE(table) << table.error().what();
    hello.token = table.value().token;
    address_ = table.value().addresses[0];
    hello.rank = 1;
    hello.ranks = 2;
  }
  // Returns a connection to rank 0 that has sent no hello.
  std::shared_ptr<Connection> connect() {
    return transport_->connector()->connect(address_, {.loop = loop_, .deadline = soon()});
  }
  void say_hello(Traffic traffic) {
    auto& connection = connections_[static_cast<std::size_t>(traffic)] = connect();
    hello.traffic = traffic;
    connection->send(encode(hello), {}, Pin(), Fence());
    receive(connection, traffic);
  }
  // Joins: meets, sends both hellos, and passes the barrier at the end of joining.
  void join() {
    meet();
    for (const Traffic traffic : {Traffic::Collectives, Traffic::Messages}) say_hello(traffic);
    Header barrier;
    barrier.call.kind = Kind::Barrier;
    say(Traffic::Collectives, barrier);
    hear(Traffic::Collectives);
  }

  Op say(Traffic traffic, const Header& header, std::size_t payload_bytes = 0) {
    const auto payload = std::make_shared<std::vector<std::byte>>(payload_bytes);
    const Slice slice{payload->data(), payload_bytes, Device::host()};
    return connections_[static_cast<std::size_t>(traffic)]->send(
        encode(header), {&slice, payload_bytes > 0 ? std::size_t{1} : 0}, payload, Fence());
  }
  Op say_raw(Traffic traffic, const std::vector<std::byte>& header) {
    return connections_[static_cast<std::size_t>(traffic)]->send(header, {}, Pin(), Fence());
  }
  // Returns the next message of the connection, without its payload.
  Message hear(Traffic traffic) {
    std::unique_lock lock(mutex_);
    auto& seen = seen_[static_cast<std::size_t>(traffic)];
    EXPECT_TRUE(changed_.wait_until(lock, soon().point(), [&] { return !seen.empty(); }))
        << "rank 0 sends nothing";
    if (seen.empty()) return {};
    Message message = seen.front();
    seen.pop_front();
    return message;
  }
  void close() {
    for (const Traffic traffic : {Traffic::Collectives, Traffic::Messages}) close(traffic);
  }
  void close(Traffic traffic) {
    const auto& connection = connections_[static_cast<std::size_t>(traffic)];
    if (connection) connection->close(Error(Blame::Cancelled, "the script ends"));
  }

  Hello hello;

 private:
  void receive(const std::shared_ptr<Connection>& connection, Traffic traffic) {
    auto greeted = std::make_shared<bool>(false);
    connection->receive(
        {[this, weak = std::weak_ptr(connection), traffic, greeted](const Arrival& arrival) {
           if (*greeted) {
             auto message = decode(arrival.header, arrival.sizes, 2);
             std::lock_guard lock(mutex_);
             if (message) seen_[static_cast<std::size_t>(traffic)].push_back(message.value());
             changed_.notify_all();
           }
           *greeted = true;
           if (const auto live = weak.lock()) live->accept({}, Pin(), Fence());
         },
         [](const Error&) {}});
  }

  const std::shared_ptr<Bootstrap> store_;
  const std::shared_ptr<Transport> transport_ = inproc::open().value();
  std::string address_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> seen_[kConnectionsPerPair];
  std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>("scripted");
  std::shared_ptr<Connection> connections_[kConnectionsPerPair];
  std::mutex accepted_mutex_;
  std::vector<std::shared_ptr<Connection>> accepted_;
  const std::unique_ptr<Listener> listener_ = transport_->connector()->listen(
      {.loop = loop_, .interface_address = {}, .accepted = [this](auto connection) {
         std::lock_guard lock(accepted_mutex_);
         accepted_.push_back(std::move(connection));
       }});
};

}  // namespace weft::transport::mesh
