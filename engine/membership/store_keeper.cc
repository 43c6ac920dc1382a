// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <utility>

#include <weft/engine/membership/store_keeper.h>

namespace weft::group {

namespace {

constexpr std::size_t kMostGiven = 64;  // of one rank: more threads do not ask at once

// A repeated request may arrive after later ones, which it must not undo.
bool must_not_repeat(StoreCall call) {
  return call != StoreCall::Get && call != StoreCall::Check && call != StoreCall::Forget;
}

std::size_t texts_of(StoreCall call) {
  switch (call) {
    case StoreCall::Set: return 2;
    case StoreCall::CompareSet: return 3;
    case StoreCall::Add:
    case StoreCall::Erase: return 1;
    default: return 0;  // any number
  }
}

}  // namespace

void StoreKeeper::handle(int asker, const StoreMessage& request, const Answer& answer) {
  StoreMessage reply{request.number, request.call, false, 0, {}};
  const std::size_t texts = texts_of(request.call);
  if (texts != 0 && request.texts.size() != texts) {
    reply.is_refused = true;
    reply.texts = {"the request has " + std::to_string(request.texts.size()) + " texts, not " +
                   std::to_string(texts)};
    return answer(std::move(reply));
  }
  std::vector<Answered> ready;
  {
    MutexLock lock(mutex_);
    const auto is_same = [&](const Waiting& one) {
      return one.asker == asker &&
             one.request.number == (request.call == StoreCall::Forget
                                        ? static_cast<std::uint64_t>(request.amount)
                                        : request.number);
    };
    waiting_.remove_if(is_same);
    if (request.call == StoreCall::Forget) return;
    const std::size_t keys = values_.size();
    auto& given = given_[asker];
    const auto before = given.find(request.number);
    if (must_not_repeat(request.call) && before != given.end()) {
      ready.push_back({before->second, answer});
    } else if (!perform(request, reply)) {
      waiting_.push_back({asker, request, answer});
    } else {
      if (must_not_repeat(request.call)) {
        given[request.number] = reply;
        if (given.size() > kMostGiven) given.erase(given.begin());
      }
      if (values_.size() > keys) ready = answerable();
      ready.push_back({std::move(reply), answer});
    }
  }
  for (const Answered& one : ready) one.answer(one.message);
}

bool StoreKeeper::has_all(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(),
                     [this](const std::string& key)
                         WEFT_REQUIRES(mutex_) { return values_.contains(key); });
}

bool StoreKeeper::perform(const StoreMessage& request, StoreMessage& reply) {
  const auto& texts = request.texts;
  switch (request.call) {
    case StoreCall::Set: values_[texts[0]] = texts[1]; return true;
    case StoreCall::Get:
      if (!has_all(texts)) return false;
      for (const std::string& key : texts) reply.texts.push_back(values_.at(key));
      return true;
    case StoreCall::Add: {
      std::string& value = values_[texts[0]];
      std::int64_t number = 0;
      std::from_chars(value.data(), value.data() + value.size(), number);
      // Wraps around past the largest number, as in c10d's stores: the amount is another rank's.
      reply.amount = static_cast<std::int64_t>(static_cast<std::uint64_t>(number) +
                                               static_cast<std::uint64_t>(request.amount));
      value = std::to_string(reply.amount);
      return true;
    }
    case StoreCall::Check: reply.amount = has_all(texts) ? 1 : 0; return true;
    case StoreCall::CompareSet: {
      const auto found = values_.find(texts[0]);
      const bool is_expected =
          found == values_.end() ? texts[1].empty() : found->second == texts[1];
      if (is_expected) values_[texts[0]] = texts[2];
      // As c10d's stores: the present value; for a missing key the expected one.
      reply.texts = {is_expected ? texts[2] : found == values_.end() ? texts[1] : found->second};
      return true;
    }
    case StoreCall::Erase:
      reply.amount = static_cast<std::int64_t>(values_.erase(texts[0]));
      return true;
    case StoreCall::Forget: return true;
  }
  return true;
}

std::vector<StoreKeeper::Answered> StoreKeeper::answerable() {
  std::vector<Answered> ready;
  for (auto one = waiting_.begin(); one != waiting_.end();) {
    StoreMessage reply{one->request.number, one->request.call, false, 0, {}};
    if (perform(one->request, reply)) {
      ready.push_back({std::move(reply), std::move(one->answer)});
      one = waiting_.erase(one);
    } else {
      ++one;
    }
  }
  return ready;
}

}  // namespace weft::group
