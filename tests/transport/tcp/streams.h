// What the tests of streams share.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <weft/transport/tcp/striped_stream.h>
#include <weft/transport/tcp/tcp_listener.h>

namespace weft::transport::tcp {

inline Deadline patience() { return Deadline::in(std::chrono::seconds(60)); }

inline std::shared_ptr<EventLoop> make_loop(const std::string& name = "test") {
  return std::make_shared<EventLoop>(name);
}

// Bytes whose order shows: the same for everybody.
std::string pattern(std::size_t bytes, unsigned seed = 1);

// Turns the loop until it is so; fails the test where that does not happen.
void wait_until(EventLoop& loop, const std::function<bool()>& so, const std::string& what);

// One end of a stream, used as a connection uses it: written until it takes no more and again when
// there is room, read on the loop until there is nothing more.
class End {
 public:
  End(std::shared_ptr<EventLoop> loop, std::unique_ptr<ByteStream> stream);
  ~End();

  // Queues the bytes; cut into pieces of `piece` bytes where that is not 0.
  void send(const std::string& bytes, std::size_t piece = 0);
  void finish_writing();
  // Stops reading, as one that has no room, and goes on.
  void hold(bool held);
  // Blocks until so many bytes have come, and takes them.
  std::string take(std::size_t bytes);
  std::size_t received() const;
  // Blocks until everything was handed to the kernel.
  void wait_sent();
  // Blocks until the stream has ended; what came before can still be taken.
  Error wait_end();
  bool ended() const;
  ByteStream& stream() { return *core_->stream; }
  EventLoop& loop() { return *loop_; }

 private:
  struct Core {
    mutable std::mutex mutex;
    std::unique_ptr<ByteStream> stream;
    std::deque<std::string> unsent;
    std::size_t offset = 0;  // in the first
    std::string received;
    std::optional<Error> end;
    bool held = false;
    void write();
    void read();
  };
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Core> core_;
};

// A listener whose streams can be taken one by one.
class Lobby {
 public:
  explicit Lobby(std::shared_ptr<EventLoop> loop, const std::string& interface_address = "",
                 const Settings& settings = {});
  ~Lobby();
  std::string address() const { return listener_->address(); }
  // The port of its first address.
  int port() const;
  std::unique_ptr<ByteStream> take();
  std::size_t waiting() const;
  void close() { listener_.reset(); }

 private:
  struct Core {
    mutable std::mutex mutex;
    std::deque<std::unique_ptr<ByteStream>> streams;
  };
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Core> core_;
  std::unique_ptr<TcpListener> listener_;
};

std::unique_ptr<ByteStream> dial(const std::shared_ptr<EventLoop>& loop, const std::string& address,
                                 Deadline deadline = patience(), const Settings& settings = {},
                                 bool refusal_ends = false);

// Two connected descriptors: Unix sockets, or TCP over the loopback.
std::pair<Descriptor, Descriptor> socket_pair();
std::pair<Descriptor, Descriptor> tcp_pair();
// Lifts the limit on descriptors up to so many; false where this process may not have them.
bool may_have_descriptors(std::size_t count);
// Connected to the port of 127.0.0.1, blocking.
Descriptor raw_connect(int port);
// Bound to a port of 127.0.0.1, not listening: nobody else gets the port, and connecting is
// refused.
Descriptor reserved_port();

// A forked process that runs the body and then exits. Fork before threads are made.
class Child {
 public:
  // The body gets a socket to the test.
  explicit Child(const std::function<void(int to_parent)>& body);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t process() const { return process_; }
  int socket() const { return socket_.get(); }
  // Blocks for one byte that the body sent; 0 when it has ended.
  char hear() const;
  void say(char letter) const;
  void signal(int number) const;
  // Blocks until it has ended; returns its exit status, or minus the signal.
  int wait();

 private:
  Descriptor socket_;
  pid_t process_ = -1;
};

}  // namespace weft::transport::tcp
