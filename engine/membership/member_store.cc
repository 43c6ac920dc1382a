// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/engine/membership/member_store.h>

namespace weft::group {

namespace {

// How often a waiting call looks for reasons to end: seldom if it waits long, since hundreds of
// processes may share a machine. (The answer itself is noticed at once.)
constexpr std::chrono::milliseconds kFirstTurn(20), kLongestTurn(100);
// How long a call waits for its answer before it asks again.
constexpr std::chrono::milliseconds kFirstPatience(20), kLongestPatience(5000);

// A group's first rank keeps its store (kept_by_members()). Errors name ranks of the group.
constexpr int kKeeperInGroup = 0;
constexpr const char* kKeeper = "rank 0, which keeps the group's store,";

using Value = std::vector<std::uint8_t>;

std::string text_of(const Value& value) { return {value.begin(), value.end()}; }
Value value_of(const std::string& text) { return {text.begin(), text.end()}; }

class MemberStore final : public AwaitableStore {
 public:
  MemberStore(std::shared_ptr<MemberStores> stores, int keeper, std::chrono::milliseconds timeout)
      : stores_(std::move(stores)), keeper_(keeper) {
    setTimeout(timeout);
  }

  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<MemberStore>(stores_, keeper_, getTimeout());
  }
  using Store::set;
  void set(const std::string& key, const Value& value) override {
    call(StoreCall::Set, {key, text_of(value)});
  }
  using Store::compareSet;
  Value compareSet(const std::string& key, const Value& expected, const Value& desired) override {
    const auto reply = call(StoreCall::CompareSet, {key, text_of(expected), text_of(desired)});
    return value_of(reply.texts.at(0));
  }
  Value get(const std::string& key) override { return multiGet({key}).front(); }
  std::vector<Value> multiGet(const std::vector<std::string>& keys) override {
    return await(keys, Deadline::in(getTimeout()), {});
  }
  std::vector<Value> await(const std::vector<std::string>& keys, Deadline deadline,
                           const std::function<void()>& interrupt) override {
    StoreMessage request;
    request.call = StoreCall::Get;
    request.texts = keys;
    const StoreMessage reply = stores_->call(keeper_, std::move(request), deadline, interrupt);
    if (reply.texts.size() != keys.size()) throw malformed();
    std::vector<Value> values;
    for (const std::string& text : reply.texts) values.push_back(value_of(text));
    return values;
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return call(StoreCall::Add, {key}, amount).amount;
  }
  bool deleteKey(const std::string& key) override {
    return call(StoreCall::Erase, {key}).amount == 1;
  }
  bool check(const std::vector<std::string>& keys) override {
    return call(StoreCall::Check, keys).amount == 1;
  }
  std::int64_t getNumKeys() override {
    TORCH_CHECK(false, "weft: a store that a rank keeps does not count its keys");
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    await(keys, Deadline::in(timeout), {});
  }

 private:
  StoreMessage call(StoreCall what, std::vector<std::string> texts, std::int64_t amount = 0) {
    StoreMessage request;
    request.call = what;
    request.amount = amount;
    request.texts = std::move(texts);
    StoreMessage reply = stores_->call(keeper_, std::move(request), Deadline::in(getTimeout()), {});
    if (what == StoreCall::CompareSet && reply.texts.size() != 1) throw malformed();
    return reply;
  }
  Error malformed() const {
    return Error(Blame::Protocol, std::string(kKeeper) + " sent a malformed answer")
        .with_ranks({kKeeperInGroup});
  }

  const std::shared_ptr<MemberStores> stores_;
  const int keeper_;
};

}  // namespace

std::shared_ptr<MemberStores> MemberStores::make(int rank, std::shared_ptr<Membership> membership) {
  const std::shared_ptr<MemberStores> made(new MemberStores(rank, membership));
  membership->listen_to_stores([weak = std::weak_ptr(made)](const Frame& frame) {
    if (const auto alive = weak.lock()) alive->on_frame(frame);
  });
  return made;
}

c10::intrusive_ptr<c10d::Store> MemberStores::at(int keeper, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<MemberStore>(shared_from_this(), keeper, timeout);
}

void MemberStores::on_frame(const Frame& frame) {
  auto message = decode_store_message(frame.text);
  if (!message) return;
  if (frame.type == FrameType::StoreReply) return answered(*message);
  keeper_.handle(frame.rank, *message,
                 [membership = membership_, asker = frame.rank](const StoreMessage& reply) {
                   const auto alive = membership.lock();
                   if (!alive) return;
                   alive->send({FrameType::StoreReply, 0, static_cast<std::uint64_t>(asker), "",
                                encode(reply)});
                 });
}

void MemberStores::answered(const StoreMessage& reply) {
  std::shared_ptr<Asked> asked;
  {
    MutexLock lock(mutex_);
    const auto found = asked_.find(reply.number);
    if (found == asked_.end()) return;
    asked = std::move(found->second);
    asked_.erase(found);
  }
  {
    MutexLock lock(asked->mutex);
    asked->reply = reply;
  }
  asked->raise();
}

void MemberStores::send(int keeper, const StoreMessage& request) {
  if (keeper == rank_) {
    keeper_.handle(rank_, request, [weak = weak_from_this()](const StoreMessage& reply) {
      if (const auto alive = weak.lock()) alive->answered(reply);
    });
  } else if (const auto membership = membership_.lock()) {
    membership->send(
        {FrameType::StoreRequest, 0, static_cast<std::uint64_t>(keeper), "", encode(request)});
  }
}

StoreMessage MemberStores::call(int keeper, StoreMessage request, Deadline deadline,
                                const std::function<void()>& interrupt) {
  const auto membership = membership_.lock();
  const auto asked = std::make_shared<Asked>();
  const std::string who = kKeeper;
  request.number = ++last_;
  std::size_t bytes = 0;
  for (const std::string& text : request.texts) bytes += text.size();
  if (bytes > kMaxStoreText / 2) {
    throw Error(Blame::Caller, "a group's store takes no value of " + std::to_string(bytes) +
                                   " bytes; the limit is " + std::to_string(kMaxStoreText / 2));
  }
  {
    MutexLock lock(mutex_);
    asked_[request.number] = asked;
  }
  // Leaves no trace of this call if it ends without an answer.
  const auto forget = [&] {
    {
      MutexLock lock(mutex_);
      asked_.erase(request.number);
    }
    StoreMessage message;
    message.number = ++last_;
    message.call = StoreCall::Forget;
    message.amount = static_cast<std::int64_t>(request.number);
    if (request.call == StoreCall::Get) send(keeper, message);
  };
  try {
    if (request.call != StoreCall::Get)
      deadline = Deadline::sooner(deadline, Deadline::in(StoreCallBounds::limit()));
    const Deadline soon = Deadline::in(kStoreAnswers);
    std::chrono::milliseconds patience = kFirstPatience;
    Deadline repeat = Deadline::in(patience);
    send(keeper, request);
    for (auto turn = kFirstTurn;
         !asked->synchronize(Deadline::sooner(deadline, Deadline::in(turn)));
         turn = std::min(turn * 5 / 4, kLongestTurn)) {
      if (interrupt) interrupt();
      if (soon.passed()) StoreCallBounds::interrupt();
      if (const auto gone = membership ? membership->gone(keeper) : std::nullopt; gone) {
        throw Error(Blame::PeerLost, who + " " + gone->how).with_ranks({kKeeperInGroup});
      }
      if (deadline.passed()) {
        if (request.call == StoreCall::Get) throw not_set_in_time(request.texts.at(0));
        throw Error(Blame::Timeout, who + " did not answer in time").with_ranks({kKeeperInGroup});
      }
      // The request or its answer may have been lost with a rank that has died or left meanwhile.
      if (!repeat.passed()) continue;
      repeat = Deadline::in(patience = std::min(2 * patience, kLongestPatience));
      if (!membership || !membership->is_whole()) send(keeper, request);
    }
  } catch (...) {
    forget();
    throw;
  }
  MutexLock lock(asked->mutex);
  if (asked->reply.is_refused) {
    throw Error(Blame::Protocol, who + " refused a request: " +
                                     (asked->reply.texts.empty() ? "" : asked->reply.texts[0]))
        .with_ranks({kKeeperInGroup});
  }
  return std::move(asked->reply);
}

}  // namespace weft::group
