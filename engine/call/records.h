// SPDX-License-Identifier: Apache-2.0
// The records of workers in the job's store (docs/wire.md, "The job's store"). All workers write
// there, so every record that is read is checked.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <weft/engine/call/device_maps.h>
#include <weft/engine/call/types.h>
#include <weft/transport/bootstrap.h>
#include <weft/transport/routes.h>

namespace weft::call {

// The standing of a worker in its job.
enum class Standing {
  Joined,
  Left,     // of its own accord
  Joining,  // has its rank, and perhaps not yet its name
  Lost,     // did not answer
};

// The worker that had a record's rank before.
struct Predecessor {
  std::string name;
  Generation generation = -1;  // -1: there was none
  int standing = 0;
  std::string why;
  WEFT_FIELDS(name, generation, standing, why)
};

struct WorkerRecord {
  std::string name;
  int rank = -1;
  std::vector<std::pair<std::string, std::string>> offers;
  std::vector<std::pair<std::string, std::string>> device_offers;
  int standing = 0;
  StoredDevices devices;
  Generation generation = 0;
  std::uint64_t nonce = 0;  // tells two claims of one rank or name apart
  std::string why;          // why it is lost
  Predecessor before;
  WEFT_FIELDS(name, rank, offers, device_offers, standing, devices, generation, nonce, why, before)

  bool stands(Standing wanted) const { return standing == static_cast<int>(wanted); }
  // Whether the worker lives, as far as its record says.
  bool lives() const { return stands(Standing::Joined) || stands(Standing::Joining); }
};

// A worker as the others see it.
struct WorkerEntry : Member {
  std::vector<transport::Offer> offers;
  std::vector<transport::Offer> device_offers;  // for connections that carry device memory as well
  WorkerDevices devices;
};

transport::Bootstrap::Bytes written(const WorkerRecord& record);
// Throws Caller or Protocol if the bytes are not a record.
WorkerRecord read_record(const transport::Bootstrap::Bytes& bytes);
// Throws Caller if the record names a device that does not exist.
WorkerEntry entry_of(const WorkerRecord& record);

// The key of a rank's record.
std::string slot(long rank);
// Reads a rank as the store spells it. Throws Protocol for another text.
int rank_from(const std::string& text);
// The value of a key; empty if it is not set.
transport::Bootstrap::Bytes value_of(transport::Bootstrap& store, const std::string& key);

}  // namespace weft::call
