// SPDX-License-Identifier: Apache-2.0
// The corpus consists of bodies that agents write.
#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <weft/engine/autograd/messages.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/wire_records.h>
#include <weft/engine/codec/codec.h>
#include <weft/engine/rpc/operators.h>
#include <weft/engine/rpc/script.h>
#include <weft/engine/rref/references.h>
#include <weft/tests/fuzz/expect_corpus.h>
#include <weft/tests/fuzz/rpc_body_fuzz.h>

namespace weft::rpc {
namespace {

using Bytes = std::vector<std::byte>;

template <class T>
Bytes body(BodyKind kind, const T& value) {
  const Bytes encoded = encode(value);
  Bytes input(1 + encoded.size());
  input[0] = static_cast<std::byte>(kind);
  std::copy(encoded.begin(), encoded.end(), input.begin() + 1);
  return input;
}

std::map<std::string, Bytes> corpus() {
  const rref::Id id = call::number_of(1, 5);
  const rref::ForkId fork = call::number_of(2, 9);
  const at::Tensor tensor = at::arange(6, at::kFloat).reshape({2, 3});
  const autograd::PassName pass{
      .context = id, .pass = fork, .settled = 3, .plan = 0, .retain_graph = true, .failed = {fork}};
  const autograd::MessageId message{1, 77, true};
  const Outcome lost(static_cast<int>(Blame::PeerLost), "lost");
  const std::vector<std::pair<rref::Id, rref::ForkId>> owned{{id, fork}, {id, fork + 1}};
  const std::vector<OperatorValue> operands{tensor,
                                            OperatorValue(std::monostate()),
                                            OperatorValue(true),
                                            OperatorValue(std::int64_t{-2}),
                                            OperatorValue(0.5),
                                            OperatorValue(std::string("sum")),
                                            OperatorValue(c10::Scalar(1.5)),
                                            OperatorValue(c10::Device(c10::kCPU)),
                                            OperatorValue(std::vector<std::int64_t>{1, -2}),
                                            OperatorValue(std::vector<double>{0.25}),
                                            OperatorValue(std::vector<at::Tensor>{tensor})};
  const call::HelloRecord hello{3, "token", {"worker1", 1}, {"worker0", 0}, 0, 2};
  std::map<std::string, Bytes> all;
  all["hello"] = body(BodyKind::Hello, hello);
  all["failure"] =
      body(BodyKind::Failure, call::FailureRecord{1, static_cast<int>(Blame::Remote), "it threw"});
  all["activity"] = body(BodyKind::Activity, Activity{1000, 2, 3});
  all["well"] = body(BodyKind::Outcome, Outcome());
  all["lost"] = body(BodyKind::Outcome, lost);
  all["reference"] = body(BodyKind::Reference,
                          rref::ReferenceRecord{id, 1, "worker1", 0, fork, 0x1122334455667788});
  all["fork"] = body(BodyKind::Fork, std::tuple(id, fork));
  all["child_accepted"] = body(BodyKind::ChildAccepted, std::tuple(fork));
  all["user_delete"] = body(BodyKind::UserDelete, std::tuple(id, fork));
  all["will_not_come"] = body(BodyKind::WillNotCome, std::tuple(id, lost));
  all["give_back"] =
      body(BodyKind::GiveBack, std::tuple(owned, std::vector<rref::ForkId>{fork + 2}));
  all["take_back_reply"] = body(BodyKind::TakeBackReply, std::tuple(std::uint64_t{77}));
  all["fetch"] = body(BodyKind::Fetch, std::tuple(id));
  all["copy_to"] = body(BodyKind::CopyTo, std::tuple(id, 2, 0, id + 1, fork));
  all["copy"] = body(BodyKind::Copy, std::tuple(id, fork, tensor));
  all["create"] =
      body(BodyKind::Create,
           std::tuple(id, fork, std::tuple(tensor, std::int64_t{4}, std::string("name"))));
  all["operator"] = body(BodyKind::Operator, std::tuple(std::string("aten::add"), operands));
  const auto arguments =
      script_arguments(tensor, 2, std::vector<std::string>{"a"}, std::pair(0.5, true),
                       keyword("named", std::map<std::string, int>{{"b", 3}}));
  all["script"] = body(BodyKind::Script, std::tuple(std::string("net.forward"), arguments));
  all["gradient"] =
      body(BodyKind::Gradient,
           std::tuple(autograd::GradientMessage{pass, message, {tensor, at::Tensor()}}));
  all["reach"] = body(BodyKind::Reach,
                      std::tuple(pass, std::vector<autograd::MessageId>{message, {0, 78, false}}));
  all["pass_failed"] = body(BodyKind::PassFailed, std::tuple(pass, lost));
  all["clean_up"] = body(BodyKind::CleanUp, std::tuple(id));
  return all;
}

TEST(RpcBodyFuzz, CorpusIsWhatAgentsWrite) { fuzz::expect_corpus(corpus()); }

}  // namespace
}  // namespace weft::rpc
