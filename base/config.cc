// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include <unistd.h>

#include <weft/base/config.h>
#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/base/tls_files.h>

namespace weft {

namespace {

template <class Value>
Value choose(const char* variable, const char* text,
             const std::vector<std::pair<std::string, Value>>& choices, Value otherwise) {
  if (text == nullptr || *text == '\0') return otherwise;
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::string allowed;
  for (const auto& [word, value] : choices) {
    if (lower == word) return value;
    allowed += (allowed.empty() ? "" : ", ") + word;
  }
  throw Error(Blame::Caller, std::string(variable) + " is '" + text + "'; it takes " + allowed);
}

std::vector<std::string> list(const char* text) {
  std::vector<std::string> items;
  std::stringstream stream(text == nullptr ? "" : text);
  for (std::string item; std::getline(stream, item, ',');) {
    if (!item.empty()) items.push_back(item);
  }
  return items;
}

std::optional<int> number(const char* variable, const char* text, int least, int most) {
  if (text == nullptr || *text == '\0') return std::nullopt;
  int value = 0;
  const char* const end = text + std::strlen(text);
  const auto [stopped, failure] = std::from_chars(text, end, value);
  if (failure != std::errc() || stopped != end || value < least || value > most) {
    throw Error(Blame::Caller, std::string(variable) + " is '" + text +
                                   "'; it takes a number from " + std::to_string(least) + " to " +
                                   std::to_string(most));
  }
  return value;
}

}  // namespace

Config Config::from(const std::function<const char*(const char*)>& variable) {
  Config config;
  config.log = choose<LogLevel>("WEFT_LOG", variable("WEFT_LOG"),
                                {{"off", LogLevel::Off},
                                 {"error", LogLevel::Error},
                                 {"warn", LogLevel::Warn},
                                 {"info", LogLevel::Info},
                                 {"debug", LogLevel::Debug}},
                                config.log);
  config.debug = choose<DebugLevel>(
      "WEFT_DEBUG", variable("WEFT_DEBUG"),
      {{"off", DebugLevel::Off}, {"info", DebugLevel::Info}, {"detail", DebugLevel::Detail}},
      config.debug);
  config.crash_trace = choose<bool>("WEFT_CRASH_TRACE", variable("WEFT_CRASH_TRACE"),
                                    {{"on", true}, {"off", false}}, config.crash_trace);
  config.line_output = choose<bool>("WEFT_LINE_OUTPUT", variable("WEFT_LINE_OUTPUT"),
                                    {{"on", true}, {"off", false}}, config.line_output);
  config.socket_interfaces = list(variable("WEFT_SOCKET_IFNAME"));
  config.tcp_sockets =
      number("WEFT_TCP_SOCKETS", variable("WEFT_TCP_SOCKETS"), 1, 16).value_or(config.tcp_sockets);
  config.shm_copies = choose<ShmCopies>(
      "WEFT_SHM_COPIES", variable("WEFT_SHM_COPIES"),
      {{"auto", ShmCopies::Auto}, {"1", ShmCopies::One}, {"2", ShmCopies::Two}}, config.shm_copies);
  config.hierarchy =
      choose<Hierarchy>("WEFT_HIERARCHY", variable("WEFT_HIERARCHY"),
                        {{"auto", Hierarchy::Auto}, {"off", Hierarchy::Off}}, config.hierarchy);
  config.ib_devices = list(variable("WEFT_IB_HCA"));
  config.ib_gid_index = number("WEFT_IB_GID_INDEX", variable("WEFT_IB_GID_INDEX"), 0, 255);
  config.ib_service_level = number("WEFT_IB_SL", variable("WEFT_IB_SL"), 0, 15);
  config.ib_traffic_class = number("WEFT_IB_TC", variable("WEFT_IB_TC"), 0, 255);
  config.ib_timeout = number("WEFT_IB_TIMEOUT", variable("WEFT_IB_TIMEOUT"), 1, 31);
  config.gpu_direct = choose<GpuDirect>("WEFT_GPUDIRECT", variable("WEFT_GPUDIRECT"),
                                        {{"auto", GpuDirect::Auto},
                                         {"dmabuf", GpuDirect::DmaBuf},
                                         {"peermem", GpuDirect::PeerMemory},
                                         {"off", GpuDirect::Off}},
                                        config.gpu_direct);
  const auto text = [&](const char* name) {
    const char* value = variable(name);
    return std::string(value == nullptr ? "" : value);
  };
  config.backend = text("WEFT_BACKEND");
  config.timeline_file = text("WEFT_TIMELINE");
  config.dump_folder = text("WEFT_DUMP_DIR");
  config.metrics_address = text("WEFT_METRICS");
  config.status_file = text("WEFT_STATUS_FILE");
  static_cast<void>(TlsFiles::from(variable));
  return config;
}

TlsFiles TlsFiles::from(const std::function<const char*(const char*)>& variable) {
  TlsFiles files;
  std::string missing;
  std::size_t given = 0;
  const auto read = [&](const char* name, std::string& file) {
    const char* const value = variable(name);
    if (value != nullptr) file = value;
    if (file.empty()) missing += (missing.empty() ? "" : " and ") + std::string(name);
    if (!file.empty()) ++given;
  };
  read("WEFT_TLS_CERT", files.certificate);
  read("WEFT_TLS_KEY", files.key);
  read("WEFT_TLS_CA", files.authorities);
  if (given > 0 && !missing.empty()) {
    throw Error(Blame::Caller, "TLS lacks " + missing +
                                   ": set WEFT_TLS_CERT, WEFT_TLS_KEY and WEFT_TLS_CA, or none");
  }
  return files;
}

namespace {

struct Environment {
  Config config;
  TlsFiles tls_files;
};

const Environment& environment() {
  // Not the initialisation of a static variable: a process forked during it would wait for it
  // forever.
  static constinit ForkMutex mutex(ForkOrder::Config);
  static constinit std::atomic<const Environment*> read{nullptr};
  if (const Environment* const known = read.load(std::memory_order_acquire)) return *known;
  MutexLock lock(mutex);
  if (read.load(std::memory_order_relaxed) == nullptr) {
    const auto variable = [](const char* name) { return std::getenv(name); };
    read.store(new Environment{Config::from(variable), TlsFiles::from(variable)},
               std::memory_order_release);
  }
  return *read.load(std::memory_order_relaxed);
}

}  // namespace

const Config& config() { return environment().config; }
const TlsFiles& tls_files() { return environment().tls_files; }

std::vector<std::string> unknown_variables(const char* const* environment) {
  std::set<std::string, std::less<>> known{
      "WEFT_IN_GUEST"};  // read by the project's own tests and benches
  static_cast<void>(Config::from([&](const char* name) {
    known.insert(name);
    return nullptr;
  }));
  std::vector<std::string> unknown;
  for (; *environment != nullptr; ++environment) {
    const std::string_view variable(*environment);
    const std::string_view name = variable.substr(0, variable.find('='));
    if (name.starts_with("WEFT_") && !name.starts_with("WEFT_BENCH_") && !known.contains(name))
      unknown.emplace_back(name);
  }
  return unknown;
}

void check_environment() {
  static_cast<void>(config());
  // Other threads wait until the variables are read: what they call next may set one.
  static constinit ForkMutex mutex(ForkOrder::Config);
  static bool is_checked = false;
  std::string names;
  {
    MutexLock lock(mutex);
    const char* const local = std::getenv("LOCAL_RANK");
    if (std::exchange(is_checked, true) || (local != nullptr && std::string_view(local) != "0"))
      return;
    for (const std::string& name : unknown_variables(environ))
      names += (names.empty() ? "" : ", ") + name;
  }
  if (!names.empty()) {
    log::warn("the environment sets " + names +
              ", which Weft does not read; docs/environment.md lists the variables that it reads");
  }
}

}  // namespace weft
