// SPDX-License-Identifier: Apache-2.0
#include <charconv>

#include <weft/base/error.h>
#include <weft/engine/rendezvous/url.h>

namespace weft::group {

namespace {

constexpr const char* kForms =
    "; write env://, file:///path, tcp://host:port or tcp://[multicast address]:port";

void parse_query(Url& url, const std::string& text) {
  std::size_t begin = 0;
  while (begin < text.size()) {
    std::size_t end = text.find('&', begin);
    if (end == std::string::npos) end = text.size();
    const std::string item = text.substr(begin, end - begin);
    const auto equals = item.find('=');
    if (equals == std::string::npos)
      throw Error(Blame::Caller, "'" + item + "' in an init method's query has no value");
    const std::string key = item.substr(0, equals);
    if (key != "rank" && key != "world_size") {
      throw Error(
          Blame::Caller,
          "'" + key + "' in an init method's query is unknown; there are rank and world_size");
    }
    url.query[key] = item.substr(equals + 1);
    begin = end + 1;
  }
}

void parse_authority(Url& url, const std::string& text) {
  std::string host = text;
  std::string port;
  if (!text.empty() && text.front() == '[') {
    const auto close = text.find(']');
    if (close == std::string::npos)
      throw Error(Blame::Caller, "no ']' closes the address in '" + text + "'");
    host = text.substr(1, close - 1);
    const std::string rest = text.substr(close + 1);
    if (!rest.empty() && rest.front() != ':')
      throw Error(Blame::Caller, "'" + rest + "' follows the address in '" + text + "'");
    port = rest.empty() ? "" : rest.substr(1);
  } else if (const auto colon = text.rfind(':'); colon != std::string::npos) {
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
  }
  url.host = host;
  if (port.empty()) return;
  url.port = to_number("the port of '" + text + "'", port, /*least=*/1, kMaxPort);
}

}  // namespace

int to_number(const std::string& what, const std::string& text, int least, int most) {
  int value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    throw Error(Blame::Caller, what + " is '" + text + "'; it takes a number from " +
                                   std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

Url Url::parse(const std::string& text) {
  const auto colon = text.find("://");
  if (colon == std::string::npos)
    throw Error(Blame::Caller, "init method '" + text + "' has no scheme" + kForms);
  Url url;
  url.scheme = text.substr(0, colon);
  if (url.scheme != "env" && url.scheme != "file" && url.scheme != "tcp") {
    throw Error(Blame::Caller,
                "init method '" + text + "' has the unknown scheme '" + url.scheme + "'" + kForms);
  }
  std::string rest = text.substr(colon + 3);
  if (const auto question = rest.find('?'); question != std::string::npos) {
    parse_query(url, rest.substr(question + 1));
    rest.resize(question);
  }
  const auto slash = rest.find('/');
  if (slash != std::string::npos) {
    url.path = rest.substr(slash);
    rest.resize(slash);
  }
  parse_authority(url, rest);
  return url;
}

std::optional<int> Url::number(const std::string& key) const {
  const auto found = query.find(key);
  if (found == query.end()) return std::nullopt;
  return to_number("'" + key + "' in the init method", found->second);
}

}  // namespace weft::group
