// SPDX-License-Identifier: Apache-2.0
// Any process that reaches a group's port may send anything there. The bytes are either refused, or
// are frames within their limits that are unchanged when they are written again, however the bytes
// are cut; and the ledger accepts any statement of a rank about its leaving. The first byte sets
// the size of the pieces.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/membership/frame.h>
#include <weft/engine/membership/known.h>
#include <weft/engine/membership/published.h>
#include <weft/engine/membership/store_keeper.h>
#include <weft/engine/membership/store_message.h>

namespace {

using namespace weft;
using namespace weft::group;

constexpr int kRanks = 4;

struct Heard {
  std::vector<Frame> frames;
  bool is_refused = false;
};

bool is_same(const Frame& a, const Frame& b) {
  return a.type == b.type && a.rank == b.rank && a.number == b.number && a.group == b.group &&
         a.text == b.text && a.sequence == b.sequence;
}

Heard hear(std::span<const char> bytes, std::size_t piece) {
  Heard heard;
  FrameReader reader(kRanks);
  while (!bytes.empty() && !heard.is_refused) {
    const std::size_t count = std::min(piece, bytes.size());
    reader.append(bytes.first(count));
    bytes = bytes.subspan(count);
    for (;;) {
      Frame frame;
      const auto next = reader.next(frame);
      heard.is_refused = !next.ok();
      if (!next || !next.value()) break;
      heard.frames.push_back(std::move(frame));
    }
  }
  return heard;
}

void check(const Frame& frame) {
  if (frame.type < FrameType::Hello || frame.type > FrameType::Challenge)
    broken("a type that does not exist");
  if (frame.rank < 0 || frame.rank >= kRanks) broken("a rank that does not exist");
  if (frame.group.size() > kMaxFrameText || frame.text.size() > longest_text(frame.type))
    broken("beyond the limits");
  const std::string written = encode(frame);
  const Heard again = hear(written, written.size());
  if (again.frames.size() != 1 || !is_same(again.frames[0], frame))
    broken("a frame changes when it is written");
  if (const auto reason = decode_reason(frame.text, 3)) {
    for (const int rank : reason->ranks()) {
      if (rank < 0 || rank >= 3) broken("a reason names no rank of the group");
    }
    const auto again_read = decode_reason(encode_reason(*reason), 3);
    if (!again_read || again_read->text() != reason->text() ||
        again_read->ranks() != reason->ranks())
      broken("a reason changes when it is written");
  }
  if (const auto address = decode_published(frame.text)) {
    const auto read = decode_published(encode(*address));
    if (!read || read->host != address->host || read->port != address->port)
      broken("an address changes when it is written");
  }
  if (const auto message = decode_store_message(frame.text)) {
    if (encode(*message).size() > frame.text.size()) broken("a message grows when it is written");
  }
  const auto call = decode_wait_call(frame.text);
  if (!call) return;
  const auto read = decode_wait_call(encode(*call));
  if (call->number == 0 || call->call.size() > kMostSaid) broken("a call beyond the limits");
  if (!read || read->number != call->number || read->call != call->call)
    broken("a call changes when it is written");
}

// Passes frames on as membership does.
void tell(Ledger& ledger, const Frame& frame) {
  if (frame.type == FrameType::Leaving) {
    ledger.on_leaving(frame);
    if (frame.rank != 0 && !ledger.has_left(frame.rank))
      broken("a rank that has said it leaves has not left");
  } else if (frame.type == FrameType::Completed) {
    ledger.on_completed(frame.rank, static_cast<int>(frame.number));
  }
  const auto why = ledger.left_behind();
  if (why && why->blame() != Blame::PeerLost) broken("a rank's leaving is not blamed on that rank");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  const std::span input(reinterpret_cast<const char*>(data + 1), bytes - 1);
  const Heard whole = hear(input, input.size());
  const Heard pieces = hear(input, 1 + data[0]);
  if (whole.is_refused != pieces.is_refused ||
      !std::ranges::equal(whole.frames, pieces.frames, is_same)) {
    broken("how the bytes are cut makes a difference");
  }
  Ledger ledger("group", 0, {0, 1, 2, 3}, [](const Frame&) {});
  ledger.on_joined();
  static_cast<void>(ledger.begin_collective());
  ledger.begin_recv(-1);
  Known known;
  StoreKeeper keeper;
  for (const Frame& frame : whole.frames) {
    check(frame);
    if (known.take(frame)) static_cast<void>(known.all());
    if (const auto message = decode_store_message(frame.text))
      keeper.handle(frame.rank, *message, [](const StoreMessage&) {});
    tell(ledger, frame);
  }
  return 0;
}
