// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/error.h>
#include <weft/transport/weft/offers.h>

namespace weft::transport::weft {

namespace {

constexpr std::size_t kMostOffers = 8;
constexpr std::size_t kLongestName = 16;
constexpr std::size_t kLongestAddress = 2048;

Error refused(const std::string& what) {
  return {Blame::Caller, "not an address of the backend weft: " + what};
}

bool is_name(const std::string& text) {
  return !text.empty() && text.size() <= kLongestName &&
         std::all_of(text.begin(), text.end(),
                     [](char letter) { return (letter >= 'a' && letter <= 'z') || letter == '_'; });
}

bool is_address(const std::string& text) {
  return !text.empty() && text.size() <= kLongestAddress &&
         std::all_of(text.begin(), text.end(),
                     [](char letter) { return letter > ' ' && letter < 0x7f; });
}

}  // namespace

std::string encode(const std::vector<Offer>& offers) {
  std::string text;
  for (const Offer& offer : offers) text += offer.transport + " " + offer.address + "\n";
  return text;
}

Result<std::vector<Offer>> decode(const std::string& text) {
  std::vector<Offer> offers;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = text.find('\n', at);
    if (end == std::string::npos) return refused("its last line has no end");
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    const auto space = line.find(' ');
    if (space == std::string::npos || !is_name(line.substr(0, space)) ||
        !is_address(line.substr(space + 1)))
      return refused("line " + std::to_string(offers.size() + 1) +
                     " is not a transport and its address");
    offers.push_back({line.substr(0, space), line.substr(space + 1)});
    if (offers.size() > kMostOffers)
      return refused("it has more than " + std::to_string(kMostOffers) + " lines");
  }
  if (offers.empty()) return refused("it is empty");
  return offers;
}

}  // namespace weft::transport::weft
