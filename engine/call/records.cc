// SPDX-License-Identifier: Apache-2.0
#include <charconv>

#include <weft/engine/call/records.h>
#include <weft/engine/codec/values.h>

namespace weft::call {

namespace {
constexpr auto kRead = std::chrono::seconds(5);  // for reading a key that exists
}

using Bytes = transport::Bootstrap::Bytes;

Bytes written(const WorkerRecord& record) {
  const auto encoded = codec::Writer().write([&](codec::Packer& packer) { packer.pack(record); });
  const auto* data = reinterpret_cast<const Bytes::value_type*>(encoded.body.data());
  return Bytes(data, data + encoded.body.size());
}

WorkerRecord read_record(const Bytes& bytes) {
  WorkerRecord record;
  codec::Reader({}).read({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()},
                         [&](const msgpack::object& object) { object.convert(record); });
  if (record.generation < 0 || record.generation == std::numeric_limits<Generation>::max()) {
    throw Error(Blame::Protocol,
                "a worker's record in the job's store has a generation out of range");
  }
  return record;
}

WorkerEntry entry_of(const WorkerRecord& record) {
  WorkerEntry entry{
      {{record.name, record.rank}, record.generation}, {}, {}, unstored(record.devices)};
  for (const auto& [transport, address] : record.offers)
    entry.offers.push_back({transport, address});
  for (const auto& [transport, address] : record.device_offers)
    entry.device_offers.push_back({transport, address});
  return entry;
}

std::string slot(long rank) { return "worker/" + std::to_string(rank); }

int rank_from(const std::string& text) {
  int rank = -1;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (failure == std::errc() && end == text.data() + text.size() && rank >= 0) return rank;
  throw Error(Blame::Protocol,
              "'" + text.substr(0, 40) + "' in the job's store is not a worker's rank");
}

Bytes value_of(transport::Bootstrap& store, const std::string& key) {
  return store.exists(key) ? store.get(key, Deadline::in(kRead)) : Bytes();
}

}  // namespace weft::call
