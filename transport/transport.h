// A backend: one folder under transport/ with a CMakeLists.txt and one open(). CMake finds the folders and generates the
// table that registry.h shows; nothing else names a backend.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/result.h>
#include <weft/base/slice.h>
#include <weft/transport/bootstrap.h>
#include <weft/transport/communicator.h>

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
  std::string interface_address;         // local address to listen on; "" = the backend's own choice
};

// "on group 'x' (nccl, rank 0 of 2)", for messages.
inline std::string place_of(const JoinOptions& options, std::string_view backend) {
  return "on group '" + options.group_name + "' (" + std::string(backend) + ", rank " + std::to_string(options.rank) +
         " of " + std::to_string(options.size) + ")";
}

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  // Whether join() takes slices on such a device.
  virtual bool reaches(DeviceType type) const = 0;
  // Collective: returns when all ranks have joined. Throws: Timeout (naming what was missing), PeerLost, Unsupported.
  virtual std::shared_ptr<Communicator> join(const JoinOptions& options) = 0;
};

// Each backend's open(). An error says why the backend cannot be used on this machine ("no libcuda.so.1: …").
using Open = Result<std::shared_ptr<Transport>> (*)();

}  // namespace weft::transport
