// SPDX-License-Identifier: Apache-2.0
// Both halves of a connection over a queue pair, step by step.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/tests/harness/mail.h>
#include <weft/tests/transport/verbs/ends.h>

namespace weft::transport::verbs {
namespace {

using harness::bytes_of;
using harness::pattern;
using testing::HasSubstr;

std::size_t write(End& end, std::span<const std::byte> bytes) {
  return end.writer.write(std::array{Bytes(bytes)});
}

TEST(VerbsRings, BytesArriveInOrderHoweverCut) {
  Ends ends;
  std::mt19937 random(1);
  const auto sent = pattern(1, 3 << 20);
  std::vector<std::byte> got(sent.size());
  std::size_t written = 0;
  std::size_t read = 0;
  while (read < got.size()) {
    const std::size_t piece = std::min<std::size_t>(random() % 100'000, sent.size() - written);
    written += write(ends.a, std::span(sent).subspan(written, piece));
    ends.settle();
    if (random() % 2 == 0) {
      read += ends.b.reader.read(std::span(got).subspan(
          read, std::min<std::size_t>(random() % 90'000, got.size() - read)));
    } else {
      const Bytes seen = ends.b.reader.peek();
      ASSERT_LE(read + seen.size(), got.size());
      std::ranges::copy(seen, got.begin() + static_cast<std::ptrdiff_t>(read));
      ends.b.reader.consume(seen.size());
      read += seen.size();
    }
    ends.settle();
  }
  EXPECT_EQ(got, sent);
  EXPECT_EQ(ends.a.refused + ends.b.refused, "");
}

TEST(VerbsRings, LargePieceIsWrittenToItsPlace) {
  Ends ends;
  const auto piece = pattern(2, 5 << 20);
  std::vector<std::byte> place(piece.size());
  const std::size_t before = ends.fake.registrations();
  EXPECT_EQ(write(ends.a, piece), 0u);
  ends.settle();
  EXPECT_EQ(ends.b.reader.read(place), 0u);
  EXPECT_EQ(ends.fake.registrations(), before + 2);
  ends.settle();
  EXPECT_EQ(place, piece) << "the piece must arrive without a copy";
  EXPECT_TRUE(ends.a.writer.take_room());
  EXPECT_EQ(write(ends.a, piece), piece.size());
  EXPECT_EQ(ends.b.reader.read(place), place.size());
  EXPECT_EQ(ends.fake.registrations(), before) << "no registration may remain";
}

TEST(VerbsRings, SmallerPlaceTakesAPart) {
  Ends ends;
  const auto piece = pattern(3, 1 << 20);
  std::vector<std::byte> got(piece.size());
  write(ends.a, piece);
  ends.settle();
  EXPECT_EQ(ends.b.reader.read(std::span(got).first(300'000)), 0u);
  ends.settle();
  EXPECT_EQ(ends.b.reader.read(std::span(got).first(300'000)), 300'000u);
  std::size_t written = 300'000;
  EXPECT_EQ(write(ends.a, piece), written) << "the rest must wait for a place of its own";
  ends.settle();
  EXPECT_EQ(ends.b.reader.read(std::span(got).subspan(300'000)), 0u);
  ends.settle();
  EXPECT_EQ(write(ends.a, std::span(piece).subspan(300'000)), piece.size() - written);
  EXPECT_EQ(ends.b.reader.read(std::span(got).subspan(300'000)), piece.size() - written);
  EXPECT_EQ(got, piece);
}

TEST(VerbsRings, PeekingGetsLargePiecesByTheRing) {
  Ends ends;
  const auto piece = pattern(4, 1 << 20);
  std::vector<std::byte> got;
  std::size_t written = 0;
  while (got.size() < piece.size()) {
    written += write(ends.a, std::span(piece).subspan(written));
    ends.settle();
    const Bytes seen = ends.b.reader.peek();
    got.insert(got.end(), seen.begin(), seen.end());
    ends.b.reader.consume(seen.size());
    ends.settle();
  }
  EXPECT_EQ(got, piece);
}

TEST(VerbsRings, NextPieceMayBeAnnouncedEarly) {
  Ends ends;
  const auto first = pattern(5, 200 << 10);
  const auto second = pattern(6, 300 << 10);
  std::vector<std::byte> got_first(first.size());
  std::vector<std::byte> got_second(second.size());
  write(ends.a, first);
  ends.settle();
  ends.b.reader.read(got_first);
  ends.settle();
  EXPECT_EQ(
      ends.a.writer.write(std::array{Bytes(first), Bytes(bytes_of("between")), Bytes(second)}),
      first.size() + 7);
  ends.settle();
  EXPECT_EQ(ends.b.reader.read(got_first), first.size());
  std::array<std::byte, 7> between;
  EXPECT_EQ(ends.b.reader.read(between), between.size());
  EXPECT_EQ(ends.b.reader.read(got_second), 0u);
  ends.settle();
  EXPECT_EQ(write(ends.a, second), second.size());
  EXPECT_EQ(ends.b.reader.read(got_second), second.size());
  EXPECT_EQ(got_first, first);
  EXPECT_EQ(got_second, second);
}

TEST(VerbsRings, WithdrawnPlaceIsNotWrittenTo) {
  Ends ends;
  const auto piece = pattern(7, 1 << 20);
  std::vector<std::byte> place(piece.size());
  const std::vector<std::byte> before = place;
  write(ends.a, piece);
  ends.settle();
  ends.b.reader.read(place);
  const std::size_t registered = ends.fake.registrations();
  ends.b.reader.withdraw();
  EXPECT_EQ(ends.fake.registrations(), registered - 1);
  ends.settle();
  EXPECT_EQ(place, before);
  EXPECT_NE(ends.a.failed, IBV_WC_SUCCESS) << "the sender must learn of the withdrawal";
}

TEST(VerbsRings, WithdrawalStopsAWriteUnderWay) {
  Ends ends;
  const auto piece = pattern(7, 1 << 20);
  std::vector<std::byte> place(piece.size());
  const auto held = ends.b.registrations->of(place.data(), place.size(),
                                             Access::RemoteWrite);  // by another connection
  std::vector<std::byte> at_withdrawal;
  ends.fake.in_the_next_write([&] {
    ends.b.reader.withdraw();
    at_withdrawal = place;
  });
  write(ends.a, piece);
  ends.settle();
  ends.b.reader.read(place);
  ends.settle();
  ASSERT_EQ(at_withdrawal.size(), place.size()) << "nothing was written";
  EXPECT_EQ(place, at_withdrawal);
  EXPECT_NE(ends.a.failed, IBV_WC_SUCCESS) << "the sender must learn of the withdrawal";
}

TEST(VerbsRings, WithdrawnPieceIsNotRead) {
  Ends ends;
  const auto piece = pattern(8, 1 << 20);
  std::vector<std::byte> place(piece.size());
  const std::size_t before = ends.fake.registrations();
  write(ends.a, piece);
  ends.settle();
  ends.a.writer.withdraw();
  EXPECT_EQ(ends.fake.registrations(), before);
  ends.b.reader.read(place);  // the answer matches no waiting piece
  ends.settle();
  EXPECT_EQ(ends.a.refused, "");
  EXPECT_EQ(place, std::vector<std::byte>(place.size()));
}

TEST(VerbsRings, UnregistrableMemoryIsCopiedAndLogged) {
  Ends ends;
  std::vector<std::string> said;
  const log::Capture capture([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::Warn) said.emplace_back(text);
  });
  const auto piece = pattern(9, 600 << 10);
  for (const bool at_sender : {true, false}) {
    std::vector<std::byte> got(piece.size());
    std::size_t written = 0;
    ends.fake.limit_locked_memory(at_sender);
    written += write(ends.a, piece);
    ends.fake.limit_locked_memory(!at_sender);
    for (std::size_t read = 0; read < got.size();) {
      ends.settle();
      read += ends.b.reader.read(std::span(got).subspan(read));
      ends.settle();
      if (written < piece.size()) written += write(ends.a, std::span(piece).subspan(written));
    }
    EXPECT_EQ(got, piece);
    ends.fake.limit_locked_memory(false);
  }
  ASSERT_GE(said.size(), 2u);
  EXPECT_THAT(said.front(), testing::HasSubstr("ulimit -l unlimited"));
}

TEST(VerbsRings, ReadOnlyMemoryIsSentInPlace) {
  Ends ends;
  const log::Capture capture([&](LogLevel, std::string_view text) { ADD_FAILURE() << text; });
  const auto piece = pattern(13, 200 << 10);
  ends.fake.map_read_only(piece.data(), piece.size());
  std::vector<std::byte> got(piece.size());
  write(ends.a, piece);
  ends.settle();
  ends.b.reader.read(got);
  ends.settle();
  EXPECT_EQ(got, piece) << "the piece must arrive without a copy";
  EXPECT_EQ(write(ends.a, piece), piece.size());
  std::vector<std::byte> exposed(piece.size());
  const auto region = ends.b.registrations->of(exposed.data(), exposed.size(), Access::RemoteWrite);
  const auto address = reinterpret_cast<std::uintptr_t>(exposed.data());
  const auto begun = ends.a.writer.put(address, region->remote_key(), piece);
  ASSERT_TRUE(begun.ok()) << begun.error().text();
  ends.settle();
  EXPECT_EQ(exposed, piece);
}

// The key of a source is not sent to any peer, but it is a number that can be guessed.
TEST(VerbsRings, SourcesCannotBeWrittenTo) {
  Ends ends;
  const std::vector<std::byte> source(200 << 10);
  const auto registration = ends.b.registrations->of(source.data(), source.size(), Access::Read);
  const auto piece = pattern(14, 1000);
  const auto address = reinterpret_cast<std::uintptr_t>(source.data());
  ASSERT_TRUE(ends.a.writer.put(address, registration->remote_key(), piece).ok());
  ends.settle();
  EXPECT_EQ(ends.a.failed, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(source, std::vector<std::byte>(source.size()));
}

TEST(VerbsRings, IdleReaderHoldsTheWriterBack) {
  Ends ends;
  const auto block = pattern(10, 1000);
  std::size_t written = 0;
  for (int i = 0; i < 1000; ++i) {
    written += write(ends.a, block);
    ends.settle();
  }
  EXPECT_LE(written, kRingBytes);
  EXPECT_FALSE(ends.a.writer.take_room());
  std::vector<std::byte> got(written);
  EXPECT_EQ(ends.b.reader.read(got), written);
  ends.settle();
  EXPECT_TRUE(ends.a.writer.take_room());
  EXPECT_EQ(write(ends.a, block), block.size());
  EXPECT_EQ(ends.a.failed, IBV_WC_SUCCESS) << "a posted receive was missing";
}

// Neither end processes completions while the other writes: posted requests stay within the grants.
TEST(VerbsRings, ManySmallWritesNeverMissAReceive) {
  Ends ends;
  const auto byte = pattern(11, 1);
  for (int round = 0; round < 200; ++round) {
    for (int i = 0; i < 300; ++i) {
      write(ends.a, byte);
      write(ends.b, byte);
    }
    ends.settle();
    for (End* end : {&ends.a, &ends.b}) end->reader.consume(end->reader.peek().size());
    ends.settle();
    ASSERT_EQ(ends.a.failed, IBV_WC_SUCCESS);
    ASSERT_EQ(ends.b.failed, IBV_WC_SUCCESS);
    ASSERT_EQ(write(ends.a, byte), 1u) << round;
    ASSERT_EQ(write(ends.b, byte), 1u) << round;
  }
}

TEST(VerbsRings, EndFollowsAllBytes) {
  Ends ends;
  const auto bytes = pattern(12, 1000);
  write(ends.a, bytes);
  ends.a.writer.finish();
  ends.settle();
  EXPECT_TRUE(ends.b.reader.has_finished());
  EXPECT_EQ(ends.b.reader.peek().size(), 1000u);
}

// A peer that says something impossible: the reason is reported, and the state does not change.
TEST(VerbsRings, ImpossibleStatementsAreRefused) {
  const auto refusal = [](const std::function<void(Ends&)>& say) {
    Ends ends;
    say(ends);
    ends.settle();
    return ends.b.refused;
  };
  const auto note = [&](const Note& said) {
    return refusal([&](Ends& ends) {
      const auto bytes = encode(said);
      ends.fake.send_to(ends.b.pair.number(), bytes.data(), bytes.size());
    });
  };
  const auto immediate = [&](std::uint32_t value) {
    return refusal([&](Ends& ends) { ends.fake.write_to(ends.b.pair.number(), value); });
  };
  EXPECT_EQ(immediate(0), "more bytes than there was room for");
  EXPECT_EQ(immediate(kRingBytes + 1), "more bytes than there was room for");
  EXPECT_EQ(immediate(0x7fffffff), "more bytes than there was room for");
  EXPECT_EQ(immediate(kPlaced), "a piece in a place that it was not given");
  EXPECT_EQ(note({.kind = Note::Kind::Room, .position = 1}), "an impossible read position");
  EXPECT_EQ(note({.kind = Note::Kind::Room, .granted = 1}),
            "grants of more receives than were used");
  EXPECT_EQ(note({.kind = Note::Kind::Place, .bytes = 1}), "a place although no piece waits");
  EXPECT_EQ(note({.kind = Note::Kind::Waits, .position = 7, .bytes = 1}),
            "a waiting piece at a wrong position");
  EXPECT_EQ(note({.kind = Note::Kind::Waits}), "a waiting piece at a wrong position");
  EXPECT_EQ(refusal([](Ends& ends) { ends.fake.send_to(ends.b.pair.number(), "short", 5); }),
            "an invalid note");
  EXPECT_EQ(immediate(kRingBytes), "");
  EXPECT_EQ(note({.kind = Note::Kind::Waits, .bytes = ~std::uint64_t{0}}), "")
      << "a size alone must not reserve memory";
}

// True if one mapping of this process, which a forked child would share, contains the memory.
bool is_shared_mapping(const Slice& memory) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t first = 0, end = 0;
    char access[5] = {};
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s", &first, &end, access) != 3)
      continue;
    if (begin >= first && begin < end) return access[3] == 's';
  }
  return false;
}

// While private memory is registered, fork() copies its pages at once and the others later: in a
// child, a heap with such pages may contradict itself.
TEST(VerbsRegistrations, IdleConnectionHasNoneOfPrivateMemory) {
  const Ends ends;
  EXPECT_THAT(ends.fake.registered(), testing::Not(testing::IsEmpty()));
  EXPECT_THAT(ends.fake.registered(), testing::Each(testing::Truly(is_shared_mapping)));
}

TEST(VerbsRegistrations, PartOfUsedMemoryIsNotReregistered) {
  const harness::FakeVerbs fake;
  RegistrationCache cache(fake.open());
  std::vector<std::byte> memory(10'000);
  auto first = cache.of(memory.data(), memory.size(), Access::Read);
  auto part = cache.of(memory.data() + 5000, 5000, Access::Read);
  EXPECT_EQ(first, part);
  auto beyond = cache.of(memory.data() + 1, memory.size(), Access::Read);
  EXPECT_NE(beyond, first);
  EXPECT_EQ(fake.registrations(), 2u);
  first.reset();
  EXPECT_EQ(fake.registrations(), 2u);
  part.reset();
  beyond.reset();
  EXPECT_EQ(fake.registrations(), 0u);
  EXPECT_EQ(cache.in_use(), 0u);
}

TEST(VerbsRegistrations, PlacesAreRegisteredAlone) {
  const harness::FakeVerbs fake;
  RegistrationCache cache(fake.open());
  std::vector<std::byte> memory(10'000);
  const auto sent = cache.of(memory.data(), memory.size(), Access::Read);
  const auto place = cache.of(memory.data() + 1000, 5000, Access::RemoteWrite);
  EXPECT_EQ(place->memory(), (Slice{memory.data() + 1000, 5000, weft::Device::host()}));
  const auto inside = cache.of(memory.data() + 2000, 1000, Access::RemoteWrite);
  EXPECT_EQ(inside->memory().bytes, 1000u) << "otherwise its key would open the surrounding place";
  EXPECT_EQ(cache.of(memory.data() + 2000, 1000, Access::RemoteWrite), inside);
  EXPECT_EQ(cache.of(memory.data() + 2000, 1000, Access::Read), sent);
}

TEST(VerbsRegistrations, UnwritablePlaceIsTheCallersError) {
  harness::FakeVerbs fake;
  RegistrationCache cache(fake.open());
  std::vector<std::byte> memory(10'000);
  fake.map_read_only(memory.data(), memory.size());
  try {
    cache.of(memory.data(), memory.size(), Access::RemoteWrite);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("use writable memory"));
  }
}

TEST(VerbsRegistrations, FailedReleasesAreLogged) {
  harness::FakeVerbs fake;
  const auto path = fake.path();
  std::vector<std::string> said;
  const log::Capture capture([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::Error) said.emplace_back(text);
  });
  std::array<std::byte, 8> memory;
  std::optional<Registration> registration(std::in_place, path.device,
                                           Slice{memory.data(), memory.size(), {}}, Access::Read);
  fake.refuse_to_end(harness::FakeVerbs::Thing::Registration, EIO);
  registration.reset();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_THAT(said[0],
              HasSubstr("fake0: memory cannot be deregistered; a peer that has its key may "
                        "still write to it: Input/output error"));
  std::optional<Completions> completions(std::in_place, path.device, 16);
  {
    QueuePair pair(path, *completions, {16, 16, 64});
    fake.refuse_to_end(harness::FakeVerbs::Thing::QueuePair, EBUSY);
    pair.destroy();
    pair.destroy();
    EXPECT_TRUE(pair.is_stuck()) << "destroying must not be retried";
  }
  ASSERT_EQ(said.size(), 2u);
  EXPECT_THAT(said[1], HasSubstr("fake0: a queue pair cannot be destroyed"));
  fake.refuse_to_end(harness::FakeVerbs::Thing::CompletionQueue, EBUSY);
  completions.reset();
  ASSERT_EQ(said.size(), 3u);
  EXPECT_THAT(said[2],
              HasSubstr("fake0: a completion queue cannot be destroyed: Device or resource busy"));
}

TEST(VerbsRegistrations, GpuMemoryIsRefusedByName) {
  const harness::FakeVerbs fake;
  const auto device = fake.open();
  try {
    std::array<std::byte, 8> memory;
    const Registration refused(device, Slice{memory.data(), memory.size(), weft::Device::cuda(3)},
                               Access::Read);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Unsupported);
    EXPECT_THAT(error.text(), testing::HasSubstr("cuda:3"));
  }
}

TEST(VerbsErrors, FailedCompletionNamesTheBlame) {
  Library library;
  library.wc_status_str = [](ibv_wc_status) { return "the library's words"; };
  const auto error = [&](ibv_wc_status status) {
    ibv_wc completion{};
    completion.status = status;
    completion.vendor_err = 129;
    return error_of(library, completion, "192.0.2.1:4711");
  };
  const Error retries = error(IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(retries.blame(), Blame::PeerLost);
  EXPECT_EQ(retries.native_code(), IBV_WC_RETRY_EXC_ERR);
  for (const char* part : {"192.0.2.1:4711", "the library's words", "status 12", "vendor error 129",
                           "acknowledges nothing"}) {
    EXPECT_THAT(retries.text(), HasSubstr(part));
  }
  const Error not_ready = error(IBV_WC_RNR_RETRY_EXC_ERR);
  EXPECT_EQ(not_ready.blame(), Blame::PeerLost);
  EXPECT_THAT(not_ready.text(), HasSubstr("receiver not ready"));
  for (const auto status : {IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_WR_FLUSH_ERR}) {
    EXPECT_EQ(error(status).blame(), Blame::PeerLost) << status;
  }
  for (const auto status : {IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_LEN_ERR, IBV_WC_FATAL_ERR}) {
    EXPECT_EQ(error(status).blame(), Blame::Device) << status;
  }
}

}  // namespace
}  // namespace weft::transport::verbs
