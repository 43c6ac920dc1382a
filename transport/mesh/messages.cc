// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/transport/mesh/core.h>
#include <weft/transport/mesh/messages.h>

namespace weft::transport::mesh {

namespace {

Header header_of(Type type, int tag, std::uint64_t bytes, std::uint64_t number,
                 Dtype dtype = Dtype::UInt8) {
  Header header;
  header.type = type;
  header.call.dtype = dtype;
  header.call.root = tag;
  header.call.bytes = bytes;
  header.sequence = number;
  return header;
}

std::string what_of(const Transfer& transfer) {
  if (transfer.is_send) return "send to rank " + std::to_string(transfer.peer);
  return transfer.peer == kAnySource ? "recv from any rank"
                                     : "recv from rank " + std::to_string(transfer.peer);
}

bool wants(const Transfer& transfer, int peer, int tag) {
  return transfer.tag == tag && (transfer.peer == kAnySource || transfer.peer == peer);
}

}  // namespace

std::vector<PointToPoint::Unreceived> Messages::unreceived() const {
  std::vector<PointToPoint::Unreceived> all;
  for (const Unexpected& one : unexpected_) {
    if (!one.to) all.push_back({one.peer, one.tag, one.bytes});
  }
  return all;
}

Messages::Messages(Core& core) : core_(core), peers_(static_cast<std::size_t>(core.ranks)) {}

void Messages::post(TransferPointer transfer, bool is_ready) {
  if (core_.is_broken()) return end(transfer, core_.why_broken());
  if (!is_ready) return unready_.push_back(std::move(transfer));
  unready_.remove(transfer);
  transfer->deadline = Deadline::in(core_.timeout);
  core_.watch(transfer->deadline);
  if (transfer->is_send) {
    post_send(std::move(transfer));
  } else {
    post_recv(transfer);
  }
}

// --- Sending ---

void Messages::post_send(TransferPointer transfer) {
  if (transfer->peer == core_.rank) return send_to_self(transfer);
  const int peer = transfer->peer;
  if (core_.lost(peer)) return end(transfer, *core_.lost(peer));
  core_.expect(peer, Traffic::Messages, Openings::When::Now);
  of(peer).waiting.push_back(std::move(transfer));
  go_on(peer);
}

void Messages::go_on(int peer) {
  auto& waiting = of(peer).waiting;
  while (!waiting.empty() && !core_.is_broken()) {
    const TransferPointer first = waiting.front();
    if (!send_now(peer, first)) return;
    waiting.pop_front();
  }
}

// Returns false if the peer already has the largest number of announcements; the send then waits.
bool Messages::send_now(int peer, const TransferPointer& transfer) {
  Peer& to = of(peer);
  const std::uint64_t bytes = transfer->data.bytes;
  const std::uint64_t cost = bytes + kMessageCost;
  if (bytes <= kEagerBytes && cost <= to.credit) {
    to.credit -= cost;
    const Op op = core_.send(peer, Traffic::Messages,
                             header_of(Type::Eager, transfer->tag, bytes, 0, transfer->dtype),
                             transfer->data, transfer);
    follow(op, transfer, peer);
    return true;
  }
  if (to.sent.size() >= kMaxRequests) return false;
  transfer->number = next_++;
  to.sent.emplace(transfer->number, transfer);
  tell(peer, header_of(Type::Request, transfer->tag, bytes, transfer->number, transfer->dtype));
  return true;
}

void Messages::send_to_self(const TransferPointer& transfer) {
  Unexpected message{.id = next_++,
                     .peer = core_.rank,
                     .tag = transfer->tag,
                     .bytes = transfer->data.bytes,
                     .dtype = transfer->dtype};
  Peer& self = of(core_.rank);
  const std::uint64_t cost = message.bytes + kMessageCost;
  if (const auto receive = matching(core_.rank, transfer->tag)) {
    message.from = transfer;
    return give(message, receive);
  }
  if (message.bytes <= kEagerBytes && self.lent + cost <= kCredit) {
    self.lent += cost;
    message.block = core_.scratch.take(message.bytes);
    if (message.bytes > 0) std::memcpy(message.block.get(), transfer->data.data, message.bytes);
    message.is_here = true;
    finish(transfer);
  } else {
    message.from = transfer;
  }
  unexpected_.push_back(std::move(message));
}

void Messages::on_clear(int peer, const Message& message) {
  auto& sent = of(peer).sent;
  const auto found = sent.find(message.header.sequence);
  if (found == sent.end()) return nonsense(peer, "a Clear for a message that was not announced");
  const TransferPointer transfer = std::move(found->second);
  sent.erase(found);
  if (message.header.number != 0) {  // does not fit; the receiver reports that error
    finish(transfer);
  } else {
    const Header header =
        header_of(Type::Payload, transfer->tag, transfer->data.bytes, transfer->number);
    const Op op = core_.send(peer, Traffic::Messages, header, transfer->data, transfer);
    follow(op, transfer, peer);
  }
  go_on(peer);
}

void Messages::on_credit(int peer, const Message& message) {
  Peer& to = of(peer);
  if (message.header.call.bytes > kCredit - to.credit)
    return nonsense(peer, "more credit than was in use");
  to.credit += message.header.call.bytes;
  go_on(peer);
}

// --- Receiving ---

void Messages::post_recv(const TransferPointer& transfer) {
  for (auto one = unexpected_.begin(); one != unexpected_.end(); ++one) {
    if (one->to || !wants(*transfer, one->peer, one->tag)) continue;
    if (one->block && !one->is_here) {
      one->to = transfer;  // landed() completes it
      return;
    }
    Unexpected message = std::move(*one);
    unexpected_.erase(one);
    return give(message, transfer);
  }
  if (const Error* why = in_vain(*transfer)) return end(transfer, *why);
  receives_.push_back(transfer);
  if (transfer->peer != kAnySource && transfer->peer != core_.rank)
    core_.expect(transfer->peer, Traffic::Messages, Openings::When::Later);
}

// Returns the error for a receive that no rank can answer any more because its sender is lost; else
// null. A receive from any rank waits while any other rank is left: lost ranks may have sent all
// that they meant to send.
const Error* Messages::in_vain(const Transfer& receive) const {
  const Error* why = nullptr;
  for (int peer = 0; peer < core_.ranks; ++peer) {
    if (peer == core_.rank || (receive.peer != kAnySource && receive.peer != peer)) continue;
    if (!core_.lost(peer)) return nullptr;
    why = &*core_.lost(peer);
  }
  return why;
}

Messages::TransferPointer Messages::matching(int peer, int tag) {
  const auto found =
      std::find_if(receives_.begin(), receives_.end(),
                   [&](const TransferPointer& receive) { return wants(*receive, peer, tag); });
  if (found == receives_.end()) return nullptr;
  TransferPointer receive = std::move(*found);
  receives_.erase(found);
  return receive;
}

bool Messages::is_of(const Transfer& transfer, int peer, Dtype dtype) {
  if (transfer.dtype == dtype) return true;
  Completion completion = transfer.completion;
  completion.set_source_rank(peer);
  const Error why(Blame::Caller,
                  "rank " + std::to_string(peer) + " sent a message of " +
                      std::string(name(dtype)) + " (tag " + std::to_string(transfer.tag) +
                      "), which rank " + std::to_string(core_.rank) + " receives as " +
                      std::string(name(transfer.dtype)) +
                      "; the n-th send to a rank meets the n-th recv from it with the same tag, "
                      "so give messages of different kinds tags of their own");
  core_.fail(why);  // first: a caller that sees the receive fail can see why it ends the group
  completion.fail(why.within(what_of(transfer) + " " + core_.place));
  return false;
}

bool Messages::fits(const Transfer& transfer, int peer, std::uint64_t bytes) {
  if (transfer.data.bytes == bytes) return true;
  Completion completion = transfer.completion;
  completion.set_source_rank(peer);
  completion.fail(Error(
      Blame::Caller,
      what_of(transfer) + " " + core_.place + " (tag " + std::to_string(transfer.tag) + "): rank " +
          std::to_string(peer) + " sent " + elements_text(bytes, transfer.dtype) +
          ", and this recv takes exactly " + elements_text(transfer.data.bytes, transfer.dtype) +
          "; both tensors must have the same shape and dtype"));
  return false;
}

void Messages::give(Unexpected& message, const TransferPointer& transfer) {
  if (!is_of(*transfer, message.peer, message.dtype)) {
    if (message.from) end(message.from, core_.why_broken());
    return;
  }
  const bool waits_at_peer = !message.block && !message.from;
  if (waits_at_peer) {
    --of(message.peer).requests;
    return clear(message.peer, message.number, message.bytes, transfer);
  }
  if (fits(*transfer, message.peer, message.bytes)) {
    const void* const bytes = message.from ? message.from->data.data : message.block.get();
    if (message.bytes > 0) std::memmove(transfer->data.data, bytes, message.bytes);
    finish(transfer, message.peer);
  }
  if (message.from) return finish(message.from);
  core_.scratch.give(std::move(message.block), message.bytes);
  give_back(message.peer, message.bytes + kMessageCost);
}

void Messages::clear(int peer, std::uint64_t number, std::uint64_t bytes,
                     const TransferPointer& transfer) {
  Header header = header_of(Type::Clear, transfer->tag, 0, number);
  if (fits(*transfer, peer, bytes)) {
    if (!of(peer).due.emplace(number, transfer).second) {
      nonsense(peer, "the same announcement twice");
      return end(transfer, core_.why_broken());
    }
  } else {
    header.number = 1;
  }
  tell(peer, header);
}

void Messages::on_eager(int peer, const Message& message) {
  const std::uint64_t bytes = message.payload;
  const std::uint64_t cost = bytes + kMessageCost;
  Peer& from = of(peer);
  if (bytes > kEagerBytes || from.lent + cost > kCredit)
    return nonsense(peer, "a message that exceeds its credit");
  from.lent += cost;
  const int tag = message.header.call.root;
  const Dtype dtype = message.header.call.dtype;
  if (const auto receive = matching(peer, tag)) {
    if (!is_of(*receive, peer, dtype)) return;
    if (!fits(*receive, peer, bytes)) {
      core_.discard(peer, Traffic::Messages);
      return give_back(peer, cost);
    }
    return follow(core_.accept(peer, Traffic::Messages, receive->data, receive), receive, peer,
                  cost);
  }
  Unexpected& one = unexpected_.emplace_back();
  one = {.id = next_++,
         .peer = peer,
         .tag = tag,
         .bytes = bytes,
         .dtype = dtype,
         .block = core_.scratch.take(bytes)};
  const Op op =
      core_.accept(peer, Traffic::Messages, {one.block.get(), bytes, Device::host()}, one.block);
  one.is_here = core_.ended(op, event::Landed{peer, one.id, std::nullopt});
}

void Messages::landed(event::Landed& event) {
  if (event.error) return;  // the connection ends and reports it
  const auto found =
      std::find_if(unexpected_.begin(), unexpected_.end(),
                   [&](const Unexpected& one) { return one.id == event.unexpected; });
  if (found == unexpected_.end()) return;
  found->is_here = true;
  if (!found->to) return;
  Unexpected message = std::move(*found);
  unexpected_.erase(found);
  give(message, message.to);
}

void Messages::on_request(int peer, const Message& message) {
  core_.discard(peer, Traffic::Messages);
  const Header& header = message.header;
  if (const auto receive = matching(peer, header.call.root)) {
    if (!is_of(*receive, peer, header.call.dtype)) return;
    return clear(peer, header.sequence, header.call.bytes, receive);
  }
  if (++of(peer).requests > kMaxRequests) return nonsense(peer, "too many announcements");
  unexpected_.push_back({.id = next_++,
                         .peer = peer,
                         .tag = header.call.root,
                         .bytes = header.call.bytes,
                         .dtype = header.call.dtype,
                         .number = header.sequence});
}

void Messages::on_payload(int peer, const Message& message) {
  auto& due = of(peer).due;
  const auto found = due.find(message.header.sequence);
  if (found == due.end()) return nonsense(peer, "a payload that was not requested");
  if (message.payload != found->second->data.bytes)
    return nonsense(peer, "a payload of a different size than it announced");
  const TransferPointer receive = std::move(found->second);
  due.erase(found);
  follow(core_.accept(peer, Traffic::Messages, receive->data, receive), receive, peer);
}

// --- Both ---

void Messages::arrived(int peer, const Message& message) {
  switch (message.header.type) {
    case Type::Eager: return on_eager(peer, message);
    case Type::Request: return on_request(peer, message);
    case Type::Payload: return on_payload(peer, message);
    case Type::Clear: core_.discard(peer, Traffic::Messages); return on_clear(peer, message);
    case Type::Credit: core_.discard(peer, Traffic::Messages); return on_credit(peer, message);
    case Type::Collective:
    case Type::Failure:
    case Type::Closing: break;
  }
}

void Messages::follow(const Op& op, const TransferPointer& transfer, int peer,
                      std::uint64_t credit) {
  event::TransferEnded event{transfer, peer, credit, std::nullopt};
  if (core_.ended(op, event)) return ended(event);
  moving_.push_back(transfer);
}

void Messages::ended(event::TransferEnded& event) {
  moving_.remove(event.transfer);
  if (core_.is_broken())
    return end(event.transfer, core_.why_broken());  // no effect if it has failed before
  if (event.error) {
    const Error why =
        core_.lost(event.peer)
            ? *core_.lost(event.peer)
            : Error(Blame::PeerLost, "the connection with rank " + std::to_string(event.peer) +
                                         " has ended: " + event.error->text())
                  .with_ranks({event.peer});
    return end(event.transfer, why);
  }
  finish(event.transfer, event.transfer->is_send ? -1 : event.peer);
  if (event.credit > 0) give_back(event.peer, event.credit);
}

void Messages::give_back(int peer, std::uint64_t credit) {
  Peer& from = of(peer);
  if (core_.lost(peer)) return;
  from.lent -= credit;
  if (peer == core_.rank) return;
  from.returned += credit;
  if (from.returned < kCredit / 2) return;
  tell(peer, header_of(Type::Credit, 0, from.returned, 0));
  from.returned = 0;
}

void Messages::tell(int peer, Header header) {
  if (core_.lost(peer)) return;
  core_.send(peer, Traffic::Messages, header, Slice(), Pin());
}

void Messages::finish(const TransferPointer& transfer, int source) {
  if (source >= 0) transfer->completion.set_source_rank(source);
  const Pin pin = std::move(transfer->pin);  // dropped after the completion has been told
  transfer->completion.finish();
}

void Messages::end(const TransferPointer& transfer, const Error& why) noexcept {
  transfer->completion.fail(why.within(what_of(*transfer) + " " + core_.place));
}

void Messages::nonsense(int peer, const std::string& what) {
  core_.fail(
      Error(Blame::Protocol, "rank " + std::to_string(peer) + " sent " + what).with_ranks({peer}));
}

void Messages::lost(int peer) {
  const Error& why = *core_.lost(peer);
  Peer& gone = of(peer);
  std::vector<TransferPointer> ended(gone.waiting.begin(), gone.waiting.end());
  for (const auto& [number, transfer] : gone.sent) ended.push_back(transfer);
  for (const auto& [number, transfer] : gone.due) ended.push_back(transfer);
  std::erase_if(receives_, [&](const TransferPointer& receive) {
    const bool waits_in_vain = in_vain(*receive) != nullptr;
    if (waits_in_vain) ended.push_back(receive);
    return waits_in_vain;
  });
  // Messages that have arrived completely may still be received.
  std::erase_if(unexpected_, [&](const Unexpected& one) {
    const bool is_cut_off = one.peer == peer && !one.is_here;
    if (is_cut_off && one.to) ended.push_back(one.to);
    return is_cut_off;
  });
  gone = Peer();
  for (const TransferPointer& transfer : ended) end(transfer, why);
}

std::vector<Messages::TransferPointer> Messages::all() const {
  std::vector<TransferPointer> transfers(receives_.begin(), receives_.end());
  for (const Peer& peer : peers_) {
    transfers.insert(transfers.end(), peer.waiting.begin(), peer.waiting.end());
    for (const auto& [number, transfer] : peer.sent) transfers.push_back(transfer);
    for (const auto& [number, transfer] : peer.due) transfers.push_back(transfer);
  }
  for (const Unexpected& one : unexpected_) {
    if (one.from) transfers.push_back(one.from);
    if (one.to) transfers.push_back(one.to);
  }
  transfers.insert(transfers.end(), moving_.begin(), moving_.end());
  return transfers;
}

void Messages::fail(const Error& why) noexcept {
  auto transfers = all();
  transfers.insert(transfers.end(), unready_.begin(), unready_.end());
  moving_.remove_if([](const TransferPointer& transfer) { return transfer->is_send; });
  std::erase_if(transfers, [&](const TransferPointer& transfer) {
    return std::find(moving_.begin(), moving_.end(), transfer) != moving_.end();
  });
  receives_.clear();
  unready_.clear();
  unexpected_.clear();
  for (Peer& peer : peers_) peer = Peer();
  for (const TransferPointer& transfer : transfers) end(transfer, why);
}

void Messages::let_go() noexcept {
  for (const TransferPointer& transfer : std::exchange(moving_, {}))
    end(transfer, core_.why_broken());
}

void Messages::mark_busy(std::vector<bool>& busy) const {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    const Peer& one = peers_[peer];
    busy[peer] = !one.waiting.empty() || !one.sent.empty() || !one.due.empty() || one.requests > 0;
  }
  for (const TransferPointer& receive : receives_)
    if (receive->peer != kAnySource) busy[static_cast<std::size_t>(receive->peer)] = true;
}

Deadline Messages::deadline() const {
  Deadline first = Deadline::never();
  for (const TransferPointer& transfer : all()) first = Deadline::sooner(first, transfer->deadline);
  return first;
}

Error Messages::why_late() const {
  const std::string late = " has not ended within " + weft::describe(core_.timeout);
  for (const TransferPointer& transfer : all()) {
    if (!transfer->deadline.passed()) continue;
    const Error why(Blame::Timeout,
                    what_of(*transfer) + " (tag " + std::to_string(transfer->tag) + ")" + late);
    return transfer->peer == kAnySource ? why : why.with_ranks({transfer->peer});
  }
  return {Blame::Timeout, "a message" + late};
}

}  // namespace weft::transport::mesh
