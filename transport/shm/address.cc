// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/descriptor.h>
#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shm/address.h>

namespace weft::transport::shm {

namespace {

template <class Number>
bool parse_number(const std::string& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number > 0;
}

}  // namespace

Address Address::parse(const std::string& text) {
  std::vector<std::string> parts{""};
  for (const char letter : text) {
    if (letter == '/') {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  Address address;
  if (parts.size() != 4 || parts[0].empty() || parts[1].empty() ||
      !parse_number(parts[2], address.process) || !parse_number(parts[3], address.descriptor)) {
    throw Error(
        Blame::Caller,
        "shm: '" + text + "' is not an address of this transport (host/processes/pid/descriptor)");
  }
  address.host = parts[0];
  address.processes = parts[1];
  return address;
}

std::string Address::text() const {
  return host + "/" + processes + "/" + std::to_string(process) + "/" + std::to_string(descriptor);
}

Address Address::here() {
  Address address;
  {
    const Descriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    if (!file && is_shortage(errno))
      throw system_error(Blame::Busy, "shm: cannot read /proc", errno);
    char text[64];
    const auto count = file ? ::read(file.get(), text, sizeof text) : 0;
    const std::string_view whole(text, static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
    address.host = whole.substr(0, whole.find('\n'));
  }
  struct stat about {};
  if (address.host.empty() || ::stat("/proc/self/ns/pid", &about) != 0) {
    throw Error(
        Blame::Unsupported,
        "shm: /proc does not show the host's boot id and the process namespace; mount /proc");
  }
  address.processes = std::to_string(about.st_ino);
  address.process = ::getpid();
  return address;
}

}  // namespace weft::transport::shm
