// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include <weft/transport/challenge.h>
#include <weft/transport/little_endian.h>
#include <weft/transport/mesh/table.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::mesh {

namespace {

enum class Content : std::uint16_t { Address = 0, Table = 1, Refusal = 2 };

Bytes bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string raw_text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::byte> front(Content content) {
  std::vector<std::byte> bytes;
  little_endian::append(bytes, kMagic);
  little_endian::append(bytes, kVersion);
  little_endian::append(bytes, static_cast<std::uint16_t>(content));
  return bytes;
}

void append(std::vector<std::byte>& to, Bytes bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

void append_text(std::vector<std::byte>& to, const std::string& text) {
  little_endian::append(to, static_cast<std::uint16_t>(text.size()));
  append(to, bytes_of(text));
}

Error refused(const std::string& what) {
  return {Blame::Protocol, what + "; run the same version of Weft on all ranks"};
}

// Reads fields from the front of bytes that may end too early.
class Fields {
 public:
  explicit Fields(Bytes bytes) : left_(bytes) {}

  template <class T>
  bool number(T& value) {
    if (left_.size() < sizeof value) return false;
    value = little_endian::get<T>(left_.data());
    left_ = left_.subspan(sizeof value);
    return true;
  }
  bool bytes(std::size_t count, Bytes& value) {
    if (left_.size() < count) return false;
    value = left_.first(count);
    left_ = left_.subspan(count);
    return true;
  }
  bool text(std::size_t most, std::string& value) {
    std::uint16_t count = 0;
    Bytes found;
    if (!number(count) || count > most || !bytes(count, found)) return false;
    value = raw_text_of(found);
    return true;
  }
  Bytes left() const { return left_; }

 private:
  Bytes left_;
};

// Returns the content that the front names.
Result<Content> read_front(Fields& fields) {
  std::uint32_t magic = 0;
  std::uint16_t version = 0, content = 0;
  if (!fields.number(magic) || magic != kMagic || !fields.number(version) ||
      !fields.number(content))
    return refused("the store holds no valid entry of it");
  if (version != kVersion) {
    return refused("it uses version " + std::to_string(version) +
                   " of the group's protocol, and this process uses version " +
                   std::to_string(kVersion));
  }
  if (content > static_cast<std::uint16_t>(Content::Refusal))
    return refused("the store holds an entry of an unknown kind");
  return static_cast<Content>(content);
}

}  // namespace

Table part_of(const Table& table, const std::vector<int>& ranks, const std::string& of_host) {
  Table part;
  part.token = table.token;
  std::map<std::uint32_t, std::uint32_t> numbers;  // of hosts
  for (const int rank : ranks) {
    const auto at = static_cast<std::size_t>(rank);
    part.addresses.push_back(table.addresses[at]);
    const auto number = static_cast<std::uint32_t>(numbers.size());
    part.hosts.push_back(numbers.emplace(table.hosts[at], number).first->second);
  }
  const bool knows_hosts = std::any_of(table.hosts.begin(), table.hosts.end(),
                                       [](std::uint32_t host) { return host > 0; });
  // The transport to all others is known where it is that of rank 0 of the table, or of a host.
  if (knows_hosts && numbers.size() == 1) {
    part.transport = of_host;
  } else if (!knows_hosts) {
    part.transport = table.transport;
  }
  return part;
}

Token group_of(const Token& token, const std::string& group_name) {
  constexpr std::string_view kPurpose = "weft group 1";
  const Proof proof = sign({reinterpret_cast<const char*>(token.data()), token.size()},
                           {std::as_bytes(std::span(kPurpose)), bytes_of(group_name)});
  Token group;
  std::copy_n(proof.begin(), group.size(), group.begin());
  return group;
}

std::vector<std::byte> encode_address(const std::string& address) {
  auto bytes = front(Content::Address);
  append(bytes, bytes_of(address));
  return bytes;
}

Result<std::string> decode_address(Bytes bytes) {
  Fields fields(bytes);
  const auto content = read_front(fields);
  if (!content) return content.error();
  if (content.value() != Content::Address || fields.left().size() > kMaxAddress)
    return refused("the store holds no valid address of it");
  return raw_text_of(fields.left());
}

std::vector<std::byte> encode(const Table& table) {
  auto bytes = front(Content::Table);
  append(bytes, table.token);
  append_text(bytes, table.transport);
  little_endian::append(bytes, static_cast<std::uint32_t>(table.addresses.size()));
  for (const std::string& address : table.addresses) append_text(bytes, address);
  for (const std::uint32_t host : table.hosts) little_endian::append(bytes, host);
  return bytes;
}

std::vector<std::byte> encode_refusal(const std::string& why) {
  auto bytes = front(Content::Refusal);
  append(bytes, bytes_of(why).first(std::min(why.size(), kMaxText)));
  return bytes;
}

Result<Table> decode_table(Bytes bytes, int ranks) {
  Fields fields(bytes);
  const auto content = read_front(fields);
  if (!content) return content.error();
  if (content.value() == Content::Refusal) {
    const Bytes text = fields.left().first(std::min(fields.left().size(), kMaxText));
    return Error(Blame::Protocol, frame::text_of(text));
  }
  Table table;
  Bytes token;
  std::uint32_t count = 0;
  if (content.value() != Content::Table || !fields.bytes(table.token.size(), token) ||
      !fields.text(kMaxName, table.transport) || !fields.number(count))
    return refused("the store holds no valid table of the ranks' addresses");
  if (count != static_cast<std::uint32_t>(ranks)) {
    return refused("the store holds the addresses of " + std::to_string(count) +
                   " ranks, this group has " + std::to_string(ranks));
  }
  std::copy(token.begin(), token.end(), table.token.begin());
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    std::string address;
    if (!fields.text(kMaxAddress, address))
      return refused("the store holds no valid address of rank " + std::to_string(rank));
    table.addresses.push_back(std::move(address));
  }
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    std::uint32_t host = 0;
    if (!fields.number(host) || host >= count)
      return refused("the store holds no valid host of rank " + std::to_string(rank));
    table.hosts.push_back(host);
  }
  if (!fields.left().empty())
    return refused("the store's table of addresses is longer than its ranks");
  return table;
}

}  // namespace weft::transport::mesh
