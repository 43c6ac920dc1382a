// SPDX-License-Identifier: Apache-2.0
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

// Arguments of Transport::join(). All ranks give the same size, and each its own rank.
struct JoinOptions {
  int rank = 0;
  int size = 1;
  std::string group_name;              // for messages
  std::shared_ptr<Bootstrap> store;    // seen by all ranks; keys are prefixed for this communicator
  Device device;                       // where the slices will lie
  std::shared_ptr<cuda::Device> cuda;  // the same device, opened, if it is a GPU
  std::chrono::milliseconds timeout{0};  // for joining and for each operation
  std::shared_ptr<EventLoop> loop;       // runs the communicator's callbacks
  std::string interface_address;         // local address to listen on; "" = the backend chooses
  // The ends of a connection prove to know it; "" = none. The store then is a SignedBootstrap.
  std::string secret;
  std::size_t max_connections = 256;  // kept open; idle ones above are closed
  // A communicator of ranks that include these, and their ranks in it, by rank; empty: none. They
  // know each other's addresses, so a mesh neither listens anew nor asks the store. All ranks give
  // theirs, or none does.
  std::weak_ptr<Communicator> parent;
  std::vector<int> parent_ranks = {};
};

// "on group 'x' (nccl, rank 0 of 2)", for messages.
inline std::string place_of(const JoinOptions& options, std::string_view backend) {
  return "on group '" + options.group_name + "' (" + std::string(backend) + ", rank " +
         std::to_string(options.rank) + " of " + std::to_string(options.size) + ")";
}

struct ListenOptions {
  std::shared_ptr<EventLoop> loop;  // of the listener and its connections
  // Local address to listen on; "" = loopback, if the transport has one.
  std::string interface_address;
  // Called on the loop for every peer that connects. The peer is not known yet: its first message
  // should identify it.
  std::function<void(std::shared_ptr<Connection>)> accepted;
  // May be empty. Called on the loop when a peer cannot be accepted for lack of descriptors or
  // memory (Busy), while the listener goes on trying. Called once, and again only after a peer has
  // been accepted.
  std::function<void(const Error&)> short_of_something = {};
};

// Listens while it lives. Accepted connections outlive it.
class Listener {
 public:
  virtual ~Listener() = default;
  // The address that connect() takes in other processes. It is complete: on another machine it is
  // refused with a clear error and never reaches the wrong peer.
  virtual std::string address() const = 0;
};

struct ConnectOptions {
  std::shared_ptr<EventLoop> loop;
  Deadline deadline = Deadline::never();  // connecting is tried until then
  bool has_listened = false;  // the peer listened before: a refusal is final and not retried
};

// The point-to-point side of a backend.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual Capabilities capabilities() const = 0;
  // Of several transports that reach a peer, the one with the highest preference is used.
  virtual int preference() const = 0;
  // Returns why this address cannot be reached from here ("another host"); nothing if it may be
  // reachable.
  virtual std::optional<std::string> why_unreachable(const std::string& address) const = 0;
  // The name of the transport by which connect() reaches this address, of a connector that has
  // several; empty: it has one, or none reaches it.
  virtual std::string transport_to(const std::string& /*address*/) const { return {}; }
  // Names the host of a listener, as far as communication sees it: listeners with equal names reach
  // each other through shared memory. Empty: that is not known, or not so from here.
  virtual std::string host_of(const std::string& /*address*/) const { return {}; }
  // The name of the transport that connects listeners of one host, of a connector that has several.
  virtual std::string transport_of_host() const { return {}; }
  // Throws Caller (no such interface), Busy (no descriptors or memory).
  virtual std::unique_ptr<Listener> listen(const ListenOptions& options) = 0;
  // Returns at once; messages wait until the connection is established. If that fails by the
  // deadline, the connection ends with PeerLost or Timeout. Throws Caller if the address is not one
  // of this transport's.
  virtual std::shared_ptr<Connection> connect(const std::string& address,
                                              const ConnectOptions& options) = 0;
};

// Made by open() as a std::shared_ptr, which communicators that open connections later hold.
class Transport : public std::enable_shared_from_this<Transport> {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  // Lists the devices and ports that the transport found on this machine, a line each, for people.
  virtual std::vector<std::string> describe() const { return {}; }
  // Null if the backend has collectives only.
  virtual Connector* connector() { return nullptr; }
  // True if the ends of the connections that join() makes prove JoinOptions::secret. A backend that
  // leaves connections to a library cannot ask for it.
  virtual bool asks_for_secret() { return connector() != nullptr; }
  // True if join() takes slices on such a device.
  virtual bool reaches(DeviceType type) const = 0;
  // Collective: returns when all ranks have joined. A backend with a connector leaves this to
  // transport/mesh. Throws Timeout (naming what was missing), PeerLost, Unsupported.
  virtual std::shared_ptr<Communicator> join(const JoinOptions& options) = 0;
};

// A backend's open(). An error says why the backend cannot be used on this machine ("no
// libcuda.so.1: …").
using Open = Result<std::shared_ptr<Transport>> (*)();

}  // namespace weft::transport
