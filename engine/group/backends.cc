// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>

#include <weft/base/config.h>
#include <weft/base/error.h>
#include <weft/engine/group/backends.h>

namespace weft::group {

namespace {

std::string lower_trimmed(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    if (std::isspace(static_cast<unsigned char>(letter)) == 0) {
      result += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    }
  }
  return result;
}

}  // namespace

bool is_default_backend(const std::string& text) { return lower_trimmed(text).empty(); }

std::string backends_of(const std::string& given) {
  if (!is_default_backend(given)) return given;
  try {
    static_cast<void>(parse_backends(config().backend));
  } catch (const Error& error) {
    throw error.within("WEFT_BACKEND");
  }
  return config().backend;
}

std::map<c10::DeviceType, std::string> parse_backends(const std::string& text) {
  const std::string wanted = lower_trimmed(text);
  const std::string all = wanted.empty() ? "cpu:weft,cuda:nccl" : wanted;
  if (all.find_first_of(",:") == std::string::npos) return {{c10::kCPU, all}, {c10::kCUDA, all}};
  std::map<c10::DeviceType, std::string> backends;
  std::size_t begin = 0;
  while (begin <= all.size()) {
    const std::size_t end = std::min(all.find(',', begin), all.size());
    const std::string item = all.substr(begin, end - begin);
    const auto colon = item.find(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == item.size()) {
      throw Error(Blame::Caller, "backend '" + text + "': '" + item +
                                     "' is not device:backend, as in cpu:weft,cuda:nccl");
    }
    const std::string device = item.substr(0, colon);
    if (device != "cpu" && device != "cuda") {
      throw Error(Blame::Caller, "backend '" + text + "': unknown device '" + device +
                                     "'; there are cpu and cuda");
    }
    const auto type = device == "cpu" ? c10::kCPU : c10::kCUDA;
    if (!backends.emplace(type, item.substr(colon + 1)).second) {
      throw Error(Blame::Caller, "backend '" + text + "' names " + device + " twice");
    }
    begin = end + 1;
  }
  return backends;
}

}  // namespace weft::group
