// A backend: one folder under transport/ with a CMakeLists.txt and one open(). CMake finds the
// folders and generates the table that registry.h shows; nothing else names a backend.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/result.h>
#include <weft/base/slice.h>
#include <weft/transport/bootstrap.h>
#include <weft/transport/communicator.h>
#include <weft/transport/connection.h>

namespace weft::cuda {
class Device;
}

namespace weft::transport {

// What join() needs to make a Communicator. All ranks give the same size, and their own rank.
struct JoinOptions {
  int rank = 0;
  int size = 1;
  std::string group_name;                // for messages
  std::shared_ptr<Bootstrap> store;      // seen by all ranks, keys prefixed for this communicator
  Device device;                         // whose memory the slices will be
  std::shared_ptr<cuda::Device> cuda;    // the same, opened, where it is a GPU
  std::chrono::milliseconds timeout{0};  // of joining, and of each operation
  std::shared_ptr<EventLoop> loop;       // what needs watching is watched here
  std::string interface_address;  // local address to listen on; "" = the backend's own choice
};

// "on group 'x' (nccl, rank 0 of 2)", for messages.
inline std::string place_of(const JoinOptions& options, std::string_view backend) {
  return "on group '" + options.group_name + "' (" + std::string(backend) + ", rank " +
         std::to_string(options.rank) + " of " + std::to_string(options.size) + ")";
}

struct ListenOptions {
  std::shared_ptr<EventLoop> loop;  // of the listener and of its connections
  std::string
      interface_address;  // local address to listen on; "" = loopback, where the transport has one
  // Called on the loop for every peer that connects. Who they are is not known yet: the first
  // message should say.
  std::function<void(std::shared_ptr<Connection>)> accepted;
  // May be empty. Called on the loop when a peer waits that cannot be taken in, for want of
  // descriptors or memory (Busy): the listener tries again. Once until it has taken one in.
  std::function<void(const Error&)> short_of_something = {};
};

// Listens while it lives. Connections that it accepted live on.
class Listener {
 public:
  virtual ~Listener() = default;
  // What connect() takes elsewhere. Says all it needs: a peer on another machine gets a clear
  // refusal, not a wrong peer.
  virtual std::string address() const = 0;
};

struct ConnectOptions {
  std::shared_ptr<EventLoop> loop;
  Deadline deadline = Deadline::never();  // until when connecting is tried
  bool has_listened = false;  // who refuses now is gone: that is the end, and nobody to wait for
};

// The point-to-point side of a backend.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual Capabilities capabilities() const = 0;
  // Of several transports that reach a peer the one with the highest wins.
  virtual int preference() const = 0;
  // Why this address cannot be reached from here ("another host"); nothing where it may be.
  virtual std::optional<std::string> why_unreachable(const std::string& address) const = 0;
  // Throws Caller (no such interface), Busy (no descriptors or memory).
  virtual std::unique_ptr<Listener> listen(const ListenOptions& options) = 0;
  // Returns at once; what is sent waits until the connection stands. If it cannot be made by the
  // deadline it ends with PeerLost or Timeout. Throws Caller where the address is not one of this
  // transport's.
  virtual std::shared_ptr<Connection> connect(const std::string& address,
                                              const ConnectOptions& options) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  // What it found on this machine (devices, ports), a line each; for people.
  virtual std::vector<std::string> describe() const { return {}; }
  // Null where the backend has collectives only.
  virtual Connector* connector() { return nullptr; }
  // Whether join() takes slices on such a device.
  virtual bool reaches(DeviceType type) const = 0;
  // Collective: returns when all ranks have joined. A backend with a connector leaves it to mesh/.
  // Throws: Timeout (naming what was missing), PeerLost, Unsupported.
  virtual std::shared_ptr<Communicator> join(const JoinOptions& options) = 0;
};

// Each backend's open(). An error says why the backend cannot be used on this machine ("no
// libcuda.so.1: …").
using Open = Result<std::shared_ptr<Transport>> (*)();

}  // namespace weft::transport
