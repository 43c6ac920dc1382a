// Finding addresses during the rendezvous: where rank 0 listens, and by which of our own addresses it sees us.
#pragma once

#include <string>

#include <weft/base/deadline.h>

namespace weft::group {

// Blocks until something accepts TCP connections there, looking every few milliseconds. Throws Timeout naming the address
// and the last failure; Caller when the host's name cannot be resolved by the deadline.
void wait_for_listener(const std::string& host, int port, Deadline deadline);

// The local address that packets to the host leave from; "" if there is no route.
std::string local_address_towards(const std::string& host, int port);

// The IPv4 or IPv6 address of an interface ("eth0"). Throws Caller, listing the interfaces there are.
std::string address_of_interface(const std::string& name);

// Whether the text is an IP multicast address (224.0.0.0/4, ff00::/8).
bool is_multicast(const std::string& host);

// How ranks below one mpirun or srun on one machine find rank 0's port: a file named after the job, which rank 0 writes and
// removes again. Only this user's files are read.
class LauncherFile {
 public:
  // `job` names the launcher's job; see launcher_job().
  explicit LauncherFile(const std::string& job);
  ~LauncherFile();
  LauncherFile(const LauncherFile&) = delete;
  LauncherFile& operator=(const LauncherFile&) = delete;

  void publish(int port);
  // Blocks until rank 0 has published. Throws Timeout.
  int port(Deadline deadline) const;

 private:
  std::string path_;
  bool published_ = false;
};

}  // namespace weft::group
