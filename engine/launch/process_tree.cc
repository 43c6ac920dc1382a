// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include <unistd.h>

#include <weft/engine/launch/process_tree.h>

namespace weft::launch {

namespace {

struct Process {
  char state = 'Z';
  pid_t parent = 0;
  pid_t session = 0;
};

Process read_process(const std::filesystem::path& folder) {
  std::string line;
  std::getline(std::ifstream(folder / "stat"), line);
  // "pid (name) state parent group session …"; the name may hold anything.
  Process process;
  if (const auto name_end = line.rfind(')'); name_end != std::string::npos) {
    pid_t group = 0;
    std::istringstream(line.substr(name_end + 1)) >> process.state >> process.parent >> group >>
        process.session;
  }
  return process;
}

std::map<pid_t, Process> all_processes() {
  std::map<pid_t, Process> all;
  std::error_code failure;
  for (std::filesystem::directory_iterator at("/proc", failure), end; !failure && at != end;
       at.increment(failure)) {
    const std::string name = at->path().filename();
    pid_t id = 0;
    const auto [stopped, wrong] = std::from_chars(name.data(), name.data() + name.size(), id);
    if (wrong == std::errc() && stopped == name.data() + name.size())
      all[id] = read_process(at->path());
  }
  return all;
}

}  // namespace

std::vector<pid_t> descendants(const std::set<pid_t>& known, bool sessions) {
  const auto all = all_processes();
  const pid_t self = ::getpid();
  const pid_t session = ::getsid(0);
  std::multimap<pid_t, pid_t> children;
  for (const auto& [id, process] : all) {
    const bool left =
        !sessions && process.parent == self && !known.contains(id) && process.session != session;
    if (process.state != 'Z' && process.state != 'X' && !left) children.emplace(process.parent, id);
  }
  std::vector<pid_t> found{self};
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto [begin, end] = children.equal_range(found[i]);
    std::for_each(begin, end, [&](const auto& item) { found.push_back(item.second); });
  }
  found.erase(found.begin());
  return found;
}

bool catches(pid_t process, int signal) {
  std::ifstream status("/proc/" + std::to_string(process) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("SigCgt:")) continue;
    const std::uint64_t mask = std::strtoull(line.c_str() + sizeof "SigCgt:", nullptr, 16);
    return (mask >> (signal - 1) & 1) != 0;
  }
  return false;
}

}  // namespace weft::launch
