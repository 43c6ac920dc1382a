// SPDX-License-Identifier: Apache-2.0
// The parts of a checkpoint, on one rank.
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

namespace fs = std::filesystem;

class CheckpointParts : public ::testing::Test {
 protected:
  const harness::Folder folder_;
  const std::string file_ = folder_.path() + "/run.pt";
  static void on_one_rank(const harness::Body& body) {
    harness::run_ranks(harness::As::Threads, 1, body);
  }
};

TEST_F(CheckpointParts, MissingPartsAreNamed) {
  on_one_rank([&](ProcessGroup group) {
    Mlp net;
    int epoch = 1;
    checkpoint::save(file_, group, {{"model", net}, {"the epoch", epoch}});
    const auto text_of = [&](const std::vector<checkpoint::Part>& parts) {
      return refused(group, Blame::Caller, [&] { checkpoint::load(file_, group, parts); });
    };
    EXPECT_THAT(
        text_of({{"modell", net}}),
        HasSubstr("part 'modell': the file has no part of that name; it has 'model', 'the epoch'"));
    EXPECT_THAT(text_of({{"model", net->first}}),
                HasSubstr("part 'model': the file has no parameter 'weight'; it has 'first.bias', "
                          "'first.weight'"));
    torch::nn::Sequential less(torch::nn::Linear(1, 1));
    auto more = std::make_shared<MlpImpl>();
    more->register_buffer("mask", torch::ones({1}));
    EXPECT_THAT(text_of({{"model", more}}),
                HasSubstr("part 'model': the file has no buffer 'mask'"));
    checkpoint::save(file_, group, {{"model", *more}});
    EXPECT_THAT(text_of({{"model", net}}),
                HasSubstr("part 'model': the file has a parameter or buffer 'mask', which the "
                          "module here does not have"));
    checkpoint::save(file_, group, {});
    EXPECT_THAT(text_of({{"model", net}}), HasSubstr("it has no parts"));
  });
}

// libtorch's own archives cannot be read back with some of these names.
std::vector<std::string> odd_names() {
  std::vector<std::string> names = {"a b",
                                    "0",
                                    "a/b",
                                    "ä",
                                    "it's \"quoted\"",
                                    "\\n",
                                    "%",
                                    "in%",
                                    "%25",
                                    "__parameters__",
                                    "__annotations__"};
  for (int letter = 0; letter < 128; ++letter) {
    if (letter != '.' && letter != '0' && letter != '%')
      names.push_back({static_cast<char>(letter)});
  }
  std::istringstream words(
      "False None True and as assert async await break class continue def del elif else except "
      "finally for from global if "
      "import in is lambda nonlocal not or pass raise return try while with yield Ellipsis "
      "NoneType self forward training "
      "torch");
  for (std::string word; words >> word;) names.push_back(word);
  return names;
}

TEST_F(CheckpointParts, MayHaveAnyName) {
  on_one_rank([&](ProcessGroup group) {
    const std::vector<std::string> names = odd_names();
    std::vector<int> numbers(names.size());
    torch::nn::Module net;
    std::vector<checkpoint::Part> parts;
    for (std::size_t i = 0; i < names.size(); ++i) {
      numbers[i] = static_cast<int>(i);
      auto child = std::make_shared<torch::nn::Module>();
      child->register_buffer(names[i], torch::full({2}, numbers[i]));
      net.register_module(names[i], child);
      parts.emplace_back(names[i], numbers[i]);
    }
    parts.emplace_back("the.net", net);
    checkpoint::save(file_, group, parts);
    const auto values = values_of(net);
    for (auto& buffer : net.buffers()) buffer.zero_();
    for (int& number : numbers) number = -1;
    checkpoint::load(file_, group, parts);
    expect_equal(values_of(net), values);
    EXPECT_EQ(values.size(), names.size());
    for (std::size_t i = 0; i < names.size(); ++i)
      EXPECT_EQ(numbers[i], static_cast<int>(i)) << names[i];
  });
}

TEST_F(CheckpointParts, TypesMustMatchTheFile) {
  on_one_rank([&](ProcessGroup group) {
    Mlp net;
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
    torch::Tensor tensor = torch::ones({2});
    std::vector<torch::Tensor> list = {torch::ones({2})};
    const std::size_t count = 300;
    const float rate = 0.1f;
    checkpoint::save(file_, group,
                     {{"number", count},
                      {"rate", rate},
                      {"text", "text"},
                      {"flag", true},
                      {"negative", -1},
                      {"tensor", tensor},
                      {"list", list},
                      {"model", net},
                      {"sgd", sgd}});
    const auto expect_refused = [&](const checkpoint::Part& part, const std::string& text) {
      EXPECT_THAT(refused(group, Blame::Caller, [&] { checkpoint::load(file_, group, {part}); }),
                  HasSubstr(text));
    };
    std::uint8_t small = 1;
    unsigned int whole = 1;
    double real = 1;
    bool flag = false;
    std::string text;
    expect_refused({"number", small},
                   "is the integer 300 in the file and of a type that cannot hold it here");
    expect_refused({"negative", whole},
                   "is the integer -1 in the file and of a type that cannot hold it here");
    expect_refused({"number", real}, "is the integer 300 in the file and of another type here");
    expect_refused({"flag", whole}, "is a bool in the file and of another type here");
    expect_refused({"rate", text},
                   "is a floating-point number in the file and of another type here");
    expect_refused(
        {"model", real},
        "is a module, an optimizer or a list of tensors in the file and a variable here");
    expect_refused({"text", tensor}, "is a string in the file and a tensor here");
    expect_refused({"tensor", net},
                   "is a tensor in the file and a module, an optimizer or a list of tensors here");
    expect_refused({"model", sgd}, "it is not an optimizer in the file");
    expect_refused({"sgd", net}, "the file has no parameter 'first.weight'");
    expect_refused({"model", list}, "is 6 tensors in the file and 1 here");
    torch::Tensor other = torch::ones({2}, torch::kLong);
    expect_refused({"tensor", other}, "is Float [2] in the file and Long [2] here");
    torch::Tensor expanded = torch::ones({1}).expand({2});
    expect_refused({"tensor", expanded}, "is expanded here");
    expect_refused({"number", 3}, "it is a constant or a temporary here");
    const bool constant = false;
    expect_refused({"flag", constant}, "it is a constant or a temporary here");
    checkpoint::load(file_, group,
                     {{"number", whole}, {"rate", real}, {"text", text}, {"flag", flag}});
    EXPECT_EQ(whole, 300u);
    EXPECT_EQ(static_cast<float>(real), rate);
    EXPECT_EQ(text, "text");
    EXPECT_TRUE(flag);
    char letter = 'w';
    double large = 1e300;
    double endless = -std::numeric_limits<double>::infinity();
    std::int64_t least = std::numeric_limits<std::int64_t>::min();
    const std::vector<checkpoint::Part> more = {
        {"letter", letter}, {"large", large}, {"endless", endless}, {"least", least}};
    checkpoint::save(file_, group, more);
    letter = 'x';
    large = endless = 0;
    least = 0;
    checkpoint::load(file_, group, more);
    EXPECT_EQ(letter, 'w');
    EXPECT_EQ(large, 1e300);
    EXPECT_EQ(least, std::numeric_limits<std::int64_t>::min());
    float single = 1;
    expect_refused({"large", single},
                   "is a floating-point number in the file and of a type that cannot hold it here");
    checkpoint::load(file_, group, {{"endless", single}});
    EXPECT_EQ(single, -std::numeric_limits<float>::infinity());
    EXPECT_THAT(
        refused(group, Blame::Caller,
                [&] {
                  checkpoint::save(file_, group, {{"huge", std::uint64_t(1) << 63}});
                }),
        HasSubstr(
            "part 'huge' of the checkpoint cannot be saved: its value exceeds the largest signed"));
  });
}

TEST_F(CheckpointParts, EmptyOnesTakeTheFilesContent) {
  on_one_rank([&](ProcessGroup group) {
    std::vector<torch::Tensor> list;
    for (int i = 0; i < 12; ++i) list.push_back(torch::full({i % 3}, i));
    // A small, non-contiguous part of large memory; the file holds only the part.
    const torch::Tensor view =
        torch::arange(1'000'000).view({1000, 1000}).narrow(0, 3, 2).narrow(1, 4, 3);
    checkpoint::save(file_, group,
                     {{"list", list}, {"view", view}, {"none", std::vector<torch::Tensor>()}});
    EXPECT_LT(fs::file_size(file_), 100'000u);
    std::vector<torch::Tensor> loaded;
    std::vector<torch::Tensor> none;
    torch::Tensor tensor;
    checkpoint::load(file_, group, {{"list", loaded}, {"view", tensor}, {"none", none}});
    expect_equal(loaded, list);
    EXPECT_TRUE(torch::equal(tensor, view));
    EXPECT_TRUE(none.empty());
  });
}

TEST_F(CheckpointParts, HoldAnOptimizersWholeState) {
  on_one_rank([&](ProcessGroup group) {
    Mlp net;
    fill(net);
    torch::optim::SGD fresh(net->parameters(), torch::optim::SGDOptions(0.25).momentum(0.9));
    checkpoint::save(file_, group, {{"optimizer", fresh}});
    torch::optim::SGD used(net->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
    auto& options = static_cast<torch::optim::SGDOptions&>(used.param_groups()[0].options());
    steps(net, used, 0, 1);
    ASSERT_EQ(used.state().size(), 6u);
    checkpoint::load(file_, group, {{"optimizer", used}});
    EXPECT_EQ(used.state().size(), 0u);
    EXPECT_EQ(options.lr(), 0.25);  // the same object

    // The file of another optimizer is refused and changes nothing.
    steps(net, used, 0, 1);
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.125));
    steps(net, adam, 0, 1);
    checkpoint::save(file_, group, {{"optimizer", adam}});
    EXPECT_THAT(
        refused(group, Blame::Caller,
                [&] {
                  checkpoint::load(file_, group, {{"optimizer", used}});
                }),
        HasSubstr("the options or the state in the file are those of another class of optimizer"));
    EXPECT_EQ(used.state().size(), 6u);
    EXPECT_EQ(options.lr(), 0.25);
    torch::optim::Adam fewer(net->first->parameters(), torch::optim::AdamOptions(1));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"optimizer", fewer}});
                        }),
                HasSubstr("the file has the state of 6 parameters, the optimizer here 2"));
    // An optimizer that has state from the beginning.
    torch::optim::Adagrad adagrad(net->parameters(), torch::optim::AdagradOptions(0.1));
    steps(net, adagrad, 0, 2);
    checkpoint::save(file_, group, {{"optimizer", adagrad}, {"model", net}});
    Mlp other;
    const std::unique_ptr<torch::optim::Optimizer> again = std::make_unique<torch::optim::Adagrad>(
        other->parameters(), torch::optim::AdagradOptions(1));
    checkpoint::load(file_, group, {{"optimizer", again}, {"model", *other}});
    steps(net, adagrad, 2, 4);
    steps(other, *again, 2, 4);
    EXPECT_EQ(difference(net->parameters(), other->parameters()), 0);
  });
}

template <class Optimizer, class Options>
void expect_to_go_on(ProcessGroup& group, const std::string& file, const Options& options) {
  const auto train = [](Mlp net, Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      const auto loss = [&] {
        optimizer.zero_grad();
        auto value = net->forward(random({4, 6}, static_cast<std::uint64_t>(step))).pow(2).sum();
        value.backward();
        return value;
      };
      loss();
      optimizer.step(loss);
    }
  };
  Mlp net;
  fill(net);
  Optimizer optimizer(net->parameters(), options);
  train(net, optimizer, 0, 3);
  checkpoint::save(file, group, {{"model", net}, {"optimizer", optimizer}});
  Mlp other;
  Optimizer again(other->parameters(), options);
  checkpoint::load(file, group, {{"model", other}, {"optimizer", again}});
  train(net, optimizer, 3, 6);
  train(other, again, 3, 6);
  EXPECT_EQ(difference(net->parameters(), other->parameters()), 0) << typeid(Optimizer).name();
}

TEST_F(CheckpointParts, MayBeAnyOptimizer) {
  on_one_rank([&](ProcessGroup group) {
    using namespace torch::optim;
    expect_to_go_on<SGD>(group, file_, SGDOptions(0.01).momentum(0.9).nesterov(true));
    expect_to_go_on<Adam>(group, file_, AdamOptions(0.01).amsgrad(true));
    expect_to_go_on<AdamW>(group, file_, AdamWOptions(0.01));
    expect_to_go_on<Adagrad>(group, file_, AdagradOptions(0.05));
    expect_to_go_on<RMSprop>(group, file_, RMSpropOptions(0.01).momentum(0.9).centered(true));
    expect_to_go_on<LBFGS>(group, file_, LBFGSOptions(0.1).max_iter(3));
    expect_to_go_on<FusedSGD>(group, file_, SGDOptions(0.01).momentum(0.9));
    expect_to_go_on<FusedAdamW>(group, file_, AdamWOptions(0.01));
  });
}

TEST_F(CheckpointParts, MayBeTensorsOfAnyKind) {
  on_one_rank([&](ProcessGroup group) {
    const auto base = torch::arange(24, torch::kFloat).view({2, 3, 2, 2});
    std::vector<torch::Tensor> tensors = {base.to(torch::MemoryFormat::ChannelsLast),
                                          base.transpose(0, 1),
                                          torch::ones({}),
                                          torch::empty({0, 3}),
                                          torch::ones({1}).expand({3, 4}),
                                          base[1]};
    for (const auto type : {torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong,
                            torch::kBool, torch::kHalf, torch::kBFloat16, torch::kDouble,
                            torch::kComplexFloat, torch::kComplexDouble}) {
      tensors.push_back(base.to(type));
    }
    tensors.push_back(torch::complex(base, base + 1).conj());
    tensors.push_back(torch::imag(tensors.back()));  // a lazy negation
    tensors.push_back(torch::ones({3}).to_sparse());
    checkpoint::save(file_, group, {{"tensors", tensors}});
    std::vector<torch::Tensor> loaded;
    checkpoint::load(file_, group, {{"tensors", loaded}});
    const auto expect_same = [&] {
      ASSERT_EQ(loaded.size(), tensors.size());
      for (std::size_t i = 0; i < loaded.size(); ++i) {
        EXPECT_EQ(loaded[i].scalar_type(), tensors[i].scalar_type()) << i;
        EXPECT_TRUE(torch::equal(loaded[i].to_dense(), tensors[i].to_dense())) << i;
      }
    };
    expect_same();
    for (auto& tensor : loaded) tensor = torch::zeros(tensor.sizes(), tensor.options());
    checkpoint::load(file_, group, {{"tensors", loaded}});
    expect_same();
    {
      const c10::InferenceMode inference;
      loaded[2] = torch::zeros({});
    }
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"tensors", loaded}});
                        }),
                HasSubstr("tensor 2 was made in inference mode"));
  });
}

TEST_F(CheckpointParts, LibtorchCanReadThem) {
  on_one_rank([&](ProcessGroup group) {
    Mlp net;
    fill(net);
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
    steps(net, optimizer, 0, 3);
    checkpoint::save(file_, group, {{"model", net}, {"optimizer", optimizer}, {"epoch", 3}});
    torch::serialize::InputArchive archive;
    archive.load_from(file_);
    Mlp other;
    torch::optim::Adam other_optimizer(other->parameters(), torch::optim::AdamOptions(1));
    torch::serialize::InputArchive model;
    torch::serialize::InputArchive state;
    c10::IValue epoch;
    archive.read("model", model);
    archive.read("optimizer", state);
    archive.read("epoch", epoch);
    other->load(model);
    other_optimizer.load(state);
    EXPECT_EQ(epoch.toInt(), 3);
    EXPECT_TRUE(other->first->weight.requires_grad());
    steps(net, optimizer, 3, 5);
    steps(other, other_optimizer, 3, 5);
    EXPECT_EQ(difference(net->parameters(), other->parameters()), 0);
  });
}

// Meta tensors stand for tensors on another device.
TEST_F(CheckpointParts, GoToTheParametersDevices) {
  on_one_rank([&](ProcessGroup group) {
    const auto made = [](torch::Device device) {
      auto net = std::make_shared<torch::nn::Module>();
      net->register_parameter("here", torch::ones({2, 3}));
      net->register_parameter("there", torch::ones({4}, device));
      return net;
    };
    const auto net = made(torch::kCPU);
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.1));
    for (auto& parameter : net->parameters())
      parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    checkpoint::save(file_, group, {{"model", net}, {"optimizer", optimizer}});
    const auto other = made(torch::kMeta);
    torch::optim::Adam loaded(other->parameters(), torch::optim::AdamOptions(0.1));
    const auto values = made(torch::kCPU);  // a module on meta cannot be loaded
    checkpoint::load(file_, group, {{"model", values}, {"optimizer", loaded}});
    for (const auto& parameter : other->parameters()) {
      ASSERT_EQ(loaded.state().count(parameter.unsafeGetTensorImpl()), 1u);
      const auto& state = static_cast<const torch::optim::AdamParamState&>(
          *loaded.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT_EQ(state.step(), 1);
      EXPECT_EQ(state.exp_avg().device(), parameter.device());
      EXPECT_EQ(state.exp_avg_sq().sizes(), parameter.sizes());
    }
    expect_equal(values->parameters(), net->parameters());
  });
}

TEST_F(CheckpointParts, LoadedTensorsStayLeaves) {
  torch::serialize::OutputArchive archive;
  torch::Tensor one = torch::ones({2}).requires_grad_();
  std::vector<torch::Tensor> list{torch::ones({2}).requires_grad_(), torch::ones({2})};
  checkpoint::save_parts(archive, {{"one", one}, {"list", list}});
  std::stringstream stream;
  archive.save_to(stream);
  torch::serialize::InputArchive loaded;
  loaded.load_from(stream);
  one = torch::Tensor();
  list.clear();
  for (const auto& commit :
       checkpoint::stage_parts(loaded, {{"one", one}, {"list", list}}, torch::kMeta))
    commit();
  ASSERT_EQ(list.size(), 2u);
  for (const auto& tensor : {one, list[0]}) {
    EXPECT_TRUE(tensor.is_meta());
    EXPECT_TRUE(tensor.requires_grad());
    EXPECT_TRUE(tensor.is_leaf());
  }
  EXPECT_FALSE(list[1].requires_grad());
}

TEST_F(CheckpointParts, EmptyGroupIsRefused) {
  EXPECT_EQ(harness::error_of([&] { checkpoint::save(file_, ProcessGroup(), {}); }).blame(),
            Blame::Caller);
}

}  // namespace
}  // namespace weft::testing
