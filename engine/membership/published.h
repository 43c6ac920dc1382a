// SPDX-License-Identifier: Apache-2.0
// The address by which the other ranks' memberships connect to a rank. Each rank publishes its own
// in the store when it joins; later the ranks tell each other (FrameType::Here), so that nobody
// needs the store any more.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::group {

struct Published {
  std::string host;
  int port = 0;
  std::string token;          // that a rank shows when it connects
  int size = 0;               // of the job, as that rank was told
  std::string backends = {};  // of its first group (Carriers::names())
};

std::string encode(const Published& address);
// Returns nullopt for text that is no address. A peer's bytes are not trusted.
std::optional<Published> decode_published(std::string_view text);

std::string random_token();
// A name for the job, by the token of its first rank, which it does not reveal.
std::string name_of_job(const std::string& token);

constexpr const char* kMemberKeys = "weft/member/";
std::string member_key(int rank);  // kMemberKeys and the rank
std::vector<std::string> member_keys(int size);

}  // namespace weft::group
