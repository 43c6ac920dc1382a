// SPDX-License-Identifier: Apache-2.0
// The entries of the store by which the ranks of a mesh meet before they are connected. Each rank
// writes its address, and rank 0 writes the table of all addresses. The decoders check every field,
// because another version of Weft, or another program, may have written it.
#pragma once

#include <string>
#include <vector>

#include <weft/transport/mesh/wire.h>

namespace weft::transport::mesh {

struct Table {
  Token token{};
  // The transport that leads from rank 0 to every other rank; empty if there are several.
  std::string transport;
  std::vector<std::string> addresses;  // by rank
  // The host of each rank, by rank; numbers below the number of ranks. All 0: collectives are done
  // in one level (layout.h).
  std::vector<std::uint32_t> hosts;
};

// The table of a group of some ranks of another, which all of them have. `of_host`: the transport
// between ranks of one host.
Table part_of(const Table& table, const std::vector<int>& ranks, const std::string& of_host);
// Names the group in a hello. Equal on all ranks, and different for each group of the ranks that
// know this token.
Token group_of(const Token& token, const std::string& group_name);

constexpr std::size_t kMaxAddress = 8192;  // bytes of one address
constexpr std::size_t kMaxName = 32;       // bytes of a transport's name

std::vector<std::byte> encode_address(const std::string& address);
Result<std::string> decode_address(Bytes bytes);

std::vector<std::byte> encode(const Table& table);
// Encodes, in place of a table, why rank 0 refuses a rank; cuts the text to kMaxText.
std::vector<std::byte> encode_refusal(const std::string& why);
// Returns an error for bytes that are not a table of `ranks` addresses; for a refusal, an error
// with its text.
Result<Table> decode_table(Bytes bytes, int ranks);

}  // namespace weft::transport::mesh
