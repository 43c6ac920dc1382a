// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <system_error>

#include <fcntl.h>

#include <weft/transport/gloo/descriptors.h>

namespace weft::transport::gloo {

namespace {

constexpr const char* kFolder = "/proc/self/fd";

// Calls each(descriptor, kind) for every open descriptor; the kind is "socket:[4711]",
// "pipe:[4712]", "anon_inode:[eventpoll]" or a path.
template <class Each>
void for_each_descriptor(const Each& each) {
  std::error_code failure;
  for (std::filesystem::directory_iterator at(kFolder, failure), end; !failure && at != end;
       at.increment(failure)) {
    const std::string name = at->path().filename();
    int descriptor = -1;
    std::from_chars(name.data(), name.data() + name.size(), descriptor);
    std::error_code gone;
    const std::string what = std::filesystem::read_symlink(at->path(), gone);
    if (!gone) each(descriptor, what);
  }
}

bool is_inherited(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFD);
  return flags >= 0 && (flags & FD_CLOEXEC) == 0;
}

void close_on_exec(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFD);
  if (flags >= 0) ::fcntl(descriptor, F_SETFD, flags | FD_CLOEXEC);
}

// The descriptors that an epoll instance watches.
std::set<int> watched_by(int instance) {
  std::set<int> watched;
  std::ifstream about("/proc/self/fdinfo/" + std::to_string(instance));
  for (std::string line; std::getline(about, line);) {
    if (!line.starts_with("tfd:")) continue;
    const auto digits = line.find_first_of("0123456789");
    int descriptor = -1;
    if (digits != std::string::npos)
      std::from_chars(line.data() + digits, line.data() + line.size(), descriptor);
    if (descriptor >= 0) watched.insert(descriptor);
  }
  return watched;
}

std::vector<int> epoll_instances() {
  std::vector<int> found;
  for_each_descriptor([&](int descriptor, const std::string& what) {
    if (what == "anon_inode:[eventpoll]") found.push_back(descriptor);
  });
  return found;
}

}  // namespace

Descriptors::Descriptors() : before_(epoll_instances()) {}

void Descriptors::close_on_exec() const {
  std::set<int> own;
  for (const int instance : epoll_instances()) {
    if (std::find(before_.begin(), before_.end(), instance) != before_.end() ||
        !is_inherited(instance))
      continue;
    own.insert(instance);
    own.merge(watched_by(instance));
  }
  std::set<std::string> pipes;
  for_each_descriptor([&](int descriptor, const std::string& what) {
    if (own.contains(descriptor) && what.starts_with("pipe:")) pipes.insert(what);
  });
  for_each_descriptor([&](int descriptor, const std::string& what) {
    if (pipes.contains(what)) own.insert(descriptor);
  });
  for (const int descriptor : own) gloo::close_on_exec(descriptor);
}

}  // namespace weft::transport::gloo
