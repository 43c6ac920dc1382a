#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <utility>

#include <weft/base/config.h>
#include <weft/base/error.h>

namespace weft {

namespace {

template <class Value>
Value choose(const char* variable, const char* text, const std::vector<std::pair<std::string, Value>>& choices,
             Value otherwise) {
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
  config.debug = choose<DebugLevel>("WEFT_DEBUG", variable("WEFT_DEBUG"),
                                    {{"off", DebugLevel::Off}, {"info", DebugLevel::Info}, {"detail", DebugLevel::Detail}},
                                    config.debug);
  config.socket_interfaces = list(variable("WEFT_SOCKET_IFNAME"));
  config.ib_devices = list(variable("WEFT_IB_HCA"));
  if (const char* file = variable("WEFT_TIMELINE")) config.timeline_file = file;
  return config;
}

const Config& config() {
  static const Config config = Config::from([](const char* name) { return std::getenv(name); });
  return config;
}

}  // namespace weft
