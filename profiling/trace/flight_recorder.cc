// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstring>

#include <weft/profiling/trace/called_by.h>
#include <weft/profiling/trace/flight_recorder.h>

namespace weft::trace {

namespace {

// A slot's phase, in the low bits of its version.
constexpr std::uint64_t kWriting = 0;
constexpr std::uint64_t kOpen = 1;
constexpr std::uint64_t kEnded = 2;
constexpr std::uint64_t phase_of(std::uint64_t version) { return version & 3; }
constexpr std::uint64_t ticket_of(std::uint64_t version) { return version >> 2; }
constexpr std::uint64_t version_of(std::uint64_t ticket, std::uint64_t phase) {
  return ticket << 2 | phase;
}

// Words are stored with release and loaded with acquire: a reader that sees a new word also sees
// the version that says "being written" when it reads the version again after all words. (Fences
// would do as well, but ThreadSanitizer does not know them.)

constexpr int kAttempts = 16;
constexpr int kSpared = 8;  // attempts that skip slots of open operations

constexpr std::uint32_t kRuns = 1U << 8;  // in the word of the state

constexpr std::size_t kEndedWord = 0;  // first the words that end() writes
constexpr std::size_t kStateWord = 1;
constexpr std::size_t kPeerWord = 2;
constexpr std::size_t kSequenceWord = 3;
constexpr std::size_t kErrorWord = 4;
constexpr std::size_t kRestWord = kErrorWord + kErrorBytes / 8;

std::uint64_t pack(std::uint32_t high, std::uint32_t low) {
  return std::uint64_t{high} << 32 | low;
}
std::uint32_t high_of(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32); }
std::uint32_t low_of(std::uint64_t word) { return static_cast<std::uint32_t>(word); }

constinit FlightRecorder recorder;

}  // namespace

FlightRecorder& flight_recorder() noexcept { return recorder; }

std::uint64_t FlightRecorder::begin(const Member& member, Kind kind, const About& about,
                                    std::int64_t time) noexcept {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::uint64_t ticket = next_.fetch_add(1, std::memory_order_relaxed) + 1;
    Slot& slot = slots_[ticket & (kRecords - 1)];
    std::uint64_t version = slot.version.load(std::memory_order_relaxed);
    const bool is_writing = version != 0 && phase_of(version) == kWriting;
    if (is_writing || ticket_of(version) > ticket) continue;
    if (phase_of(version) == kOpen && attempt < kSpared) continue;
    if (!slot.version.compare_exchange_strong(version, version_of(ticket, kWriting),
                                              std::memory_order_acq_rel))
      continue;
    Record record;
    record.member = member;
    record.kind = kind;
    record.name = about.name;
    record.sequence = about.sequence;
    record.peer = about.peer;
    record.tag = about.tag;
    record.bytes = about.bytes;
    record.dtype = about.dtype;
    record.dims = static_cast<std::uint8_t>(std::min<std::size_t>(about.shape.size(), 255));
    std::copy_n(about.shape.begin(), std::min(about.shape.size(), kMostDims), record.shape.begin());
    record.reduction = about.reduction;
    if (CalledBy::name() != nullptr) record.called_by = CalledBy::name();
    record.begun = time;
    write(slot, record);
    slot.version.store(version_of(ticket, kOpen), std::memory_order_release);
    return ticket;
  }
  return 0;
}

void FlightRecorder::run(std::uint64_t ticket) noexcept {
  if (ticket == 0) return;
  Slot& slot = slots_[ticket & (kRecords - 1)];
  if (slot.version.load(std::memory_order_acquire) != version_of(ticket, kOpen)) return;
  // Another thread may end the record at this moment: then the word is no longer 0.
  std::uint64_t open = 0;
  slot.words[kStateWord].compare_exchange_strong(open, kRuns, std::memory_order_acq_rel);
}

bool FlightRecorder::end(std::uint64_t ticket, std::int64_t time, const Error* error, int peer,
                         std::uint64_t sequence) noexcept {
  if (ticket == 0) return false;
  Slot& slot = slots_[ticket & (kRecords - 1)];
  std::uint64_t version = version_of(ticket, kOpen);
  if (!slot.version.compare_exchange_strong(version, version_of(ticket, kWriting),
                                            std::memory_order_acq_rel))
    return false;
  const auto set = [&](std::size_t word, std::uint64_t value) {
    slot.words[word].store(value, std::memory_order_release);
  };
  set(kEndedWord, static_cast<std::uint64_t>(time));
  set(kStateWord, pack(error ? static_cast<std::uint32_t>(error->blame()) : 0,
                       static_cast<std::uint32_t>(error ? State::Failed : State::Done)));
  if (peer >= 0) {
    const auto tag = low_of(slot.words[kPeerWord].load(std::memory_order_relaxed));
    set(kPeerWord, pack(static_cast<std::uint32_t>(peer), tag));
    set(kSequenceWord, sequence);
  }
  if (error != nullptr) {
    std::array<std::uint64_t, kErrorBytes / 8> text{};
    std::memcpy(text.data(), error->text().data(), std::min(error->text().size(), kErrorBytes - 1));
    for (std::size_t i = 0; i < text.size(); ++i) set(kErrorWord + i, text[i]);
  }
  slot.version.store(version_of(ticket, kEnded), std::memory_order_release);
  return true;
}

void FlightRecorder::write(Slot& slot, const Record& record) noexcept {
  const auto set = [&](std::size_t word, std::uint64_t value) {
    slot.words[word].store(value, std::memory_order_release);
  };
  set(kEndedWord, 0);
  set(kStateWord, 0);
  set(kPeerWord,
      pack(static_cast<std::uint32_t>(record.peer), static_cast<std::uint32_t>(record.tag)));
  set(kSequenceWord, record.sequence);
  set(kErrorWord, 0);  // an empty text
  std::size_t next = kRestWord;
  set(next++, std::bit_cast<std::uint64_t>(record.member.party()));
  set(next++, pack(record.member.generation(), static_cast<std::uint32_t>(record.kind)));
  set(next++, std::bit_cast<std::uint64_t>(record.name));
  set(next++, std::bit_cast<std::uint64_t>(record.dtype));
  set(next++, record.bytes);
  set(next++, static_cast<std::uint64_t>(record.begun));
  set(next++, std::bit_cast<std::uint64_t>(record.reduction));
  set(next++, std::bit_cast<std::uint64_t>(record.called_by));
  set(next++, record.dims);
  for (const auto dimension : record.shape) set(next++, static_cast<std::uint64_t>(dimension));
}

Record FlightRecorder::read(const Slot& slot) noexcept {
  const auto get = [&](std::size_t word) {
    return slot.words[word].load(std::memory_order_acquire);
  };
  Record record;
  record.ended = static_cast<std::int64_t>(get(kEndedWord));
  const std::uint64_t state = get(kStateWord);
  record.state = static_cast<State>(low_of(state) & ~kRuns);
  record.runs = (low_of(state) & kRuns) != 0;
  record.blame = static_cast<std::uint8_t>(high_of(state));
  record.peer = static_cast<int>(high_of(get(kPeerWord)));
  record.tag = static_cast<int>(low_of(get(kPeerWord)));
  record.sequence = get(kSequenceWord);
  for (std::size_t i = 0; i < kErrorBytes / 8; ++i) {
    const std::uint64_t word = get(kErrorWord + i);
    std::memcpy(record.error.data() + i * 8, &word, 8);
  }
  record.error.back() = '\0';
  std::size_t next = kRestWord;
  const auto* party = std::bit_cast<const MemberIdentity*>(get(next++));
  const std::uint64_t kind = get(next++);
  record.member = Member::known(party, high_of(kind));
  record.kind = static_cast<Kind>(low_of(kind));
  record.name = std::bit_cast<const char*>(get(next++));
  record.dtype = std::bit_cast<const char*>(get(next++));
  record.bytes = get(next++);
  record.begun = static_cast<std::int64_t>(get(next++));
  record.reduction = std::bit_cast<const char*>(get(next++));
  record.called_by = std::bit_cast<const char*>(get(next++));
  record.dims = static_cast<std::uint8_t>(get(next++));
  for (auto& dimension : record.shape) dimension = static_cast<std::int64_t>(get(next++));
  return record;
}

std::pmr::vector<Record> FlightRecorder::read(std::pmr::memory_resource* memory) const {
  std::pmr::vector<Record> records(memory);
  records.reserve(kRecords);
  const std::uint64_t first = first_.load();
  for (const Slot& slot : slots_) {
    const std::uint64_t version = slot.version.load(std::memory_order_acquire);
    // Also skips version 0: never used.
    if (phase_of(version) == kWriting || ticket_of(version) < first) continue;
    Record record = read(slot);
    if (slot.version.load(std::memory_order_relaxed) != version) continue;
    record.ticket = ticket_of(version);
    if (record.state != State::Failed) record.error = {};
    records.push_back(record);
  }
  std::sort(records.begin(), records.end(),
            [](const Record& a, const Record& b) { return a.ticket < b.ticket; });
  return records;
}

}  // namespace weft::trace
