// SPDX-License-Identifier: Apache-2.0
// TorchScript that workers expose, called by name.
#include <condition_variable>
#include <map>
#include <mutex>
#include <regex>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/sugared_value.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/jit.h>
#include <torch/library.h>
#include <torch/types.h>

#include <weft/autograd.h>
#include <weft/tests/engine/rpc/workers.h>

namespace scripts {

using namespace weft;

std::mutex mutex;
std::condition_variable opened;
bool is_open = false;
void open(bool now) {
  const std::lock_guard lock(mutex);
  is_open = now;
  opened.notify_all();
}
// An operator that scripts call.
at::Tensor once_open(const at::Tensor& x) {
  std::unique_lock lock(mutex);
  opened.wait_for(lock, std::chrono::seconds(30), [] { return is_open; });
  return x + 1;
}
TORCH_LIBRARY(weft_script_test, library) { library.def("once_open", once_open); }

// Names that Python's compiler and torch::jit::load know, but torch::jit::compile does not.
struct Names : torch::jit::Resolver {
  std::shared_ptr<torch::jit::SugaredValue> resolveValue(
      const std::string& name, torch::jit::GraphFunction& function,
      const torch::jit::SourceRange& range) override {
    if (name == "fork") return torch::jit::SpecialFormValue::create(torch::jit::prim::fork);
    if (name == "ValueError") return std::make_shared<torch::jit::ExceptionValue>(name);
    if (name == "tests") return std::make_shared<torch::jit::BuiltinModule>("weft_script_test");
    return torch::jit::nativeResolver()->resolveValue(name, function, range);
  }
};

const char* const kFunctions = R"(
def mixed(x: Tensor, text: str, times: int = 2, by: float = 1.0) -> Tensor:
    return x * times * by + len(text)

def nothing_given() -> int:
    return 7

def nothing() -> None:
    pass

def cube(x: Tensor) -> Tensor:
    return x * x * x

def all_sorts(x: Tensor, number: int, real: float, flag: bool, text: str) -> Tuple[Tensor, int, float, bool, str, Optional[int]]:
    return x + 1, number + 1, real * 2, not flag, text + "!", None

def named(names: List[str], x: Tensor) -> Dict[str, Tensor]:
    named: Dict[str, Tensor] = {}
    for name in names:
        named[name] = x * len(name)
    return named

def summed(reals: List[float], pairs: Dict[str, int], both: Tuple[int, str], maybe: Optional[List[int]] = None) -> float:
    sum = 0.0
    for real in reals:
        sum += real
    for value in pairs.values():
        sum += value
    if maybe is not None:
        sum += maybe[0]
    return sum + both[0] + len(both[1])

def joined(parts: List[Tuple[str, Tensor]]) -> Tuple[str, Optional[Tensor]]:
    names = ""
    sum: Optional[Tensor] = None
    for name, part in parts:
        names += name
        sum = part if sum is None else sum + part
    return names, sum

def counted(count: int) -> List[int]:
    return [number for number in range(count)]

def raises(x: Tensor) -> Tensor:
    if x.numel() < 100:
        raise ValueError("too few")
    return x

def when_open(x: Tensor) -> Tensor:
    return tests.once_open(x)

def later(x: Tensor) -> Future[Tensor]:
    return fork(when_open, x)

def awaits(x: Tensor) -> Tensor:
    return torch.wait(fork(when_open, x)) * 10

def fails_later(x: Tensor) -> Future[Tensor]:
    return fork(raises, x)
)";

torch::jit::Module make_net(double weight) {
  torch::jit::Module net("__torch__.Net");
  net.register_parameter("weight", at::full({1}, weight, at::kDouble).requires_grad_(),
                         /*is_buffer=*/false);
  net.define(R"(
def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
    return self.weight * x + shift

def weight_of(self) -> float:
    return float(self.weight)
)");
  return net;
}
// As if it came from a file that Python wrote.
torch::jit::Module saved_and_loaded(const torch::jit::Module& net) {
  std::stringstream file;
  net.save(file);
  return torch::jit::load(file);
}

struct Exposed {
  std::shared_ptr<torch::jit::CompilationUnit> functions =
      std::make_shared<torch::jit::CompilationUnit>();
  torch::jit::Module net = saved_and_loaded(make_net(3));
  Exposed() {
    functions->define(std::nullopt, kFunctions, std::make_shared<Names>(), nullptr);
    rpc::expose_script("math", functions);
    rpc::expose_script("net", net);
  }
};
const Exposed& exposed() {
  static const auto* const all = new Exposed;
  return *all;
}

at::Tensor gradient_of_weight() {
  return AutogradContext::current().gradient(exposed().net.attr("weight").toTensor());
}
int plus(int a, int b) { return a + b; }
at::Tensor sum_with(const at::Tensor& x, double more) { return x.sum() + more; }

}  // namespace scripts

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_workers;
using harness::Setting;
using torch::jit::Module;

class Script : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override { scripts::exposed(); }
};

std::string text_of(const std::function<void()>& call) {
  const Error error = error_of(call);
  EXPECT_EQ(error.blame(), Blame::Remote) << error.what();
  return error.text();
}
void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST_P(Script, TakesNamedAndDefaultArguments) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::ones({2});
    const auto expect = [](const at::Tensor& given, double value) {
      EXPECT_TRUE(at::equal(given, at::full({2}, value)));
    };
    for (const auto& to : {harness::after(agent, 1), agent.self()}) {
      expect(agent.sync_script("math.mixed", to, one, "abc"), 5);
      expect(agent.sync_script("math.mixed", to, one, "abc", 3), 6);
      expect(agent.sync_script("math.mixed", to, one, "abc", 3, 0.5), 4.5);
      expect(agent.sync_script("math.mixed", to, one, "abc", 3, 2), 9);
      expect(agent.sync_script("math.mixed", to, one, "abc", rpc::keyword("by", 2)), 7);
      expect(agent.sync_script("math.mixed", to, one, rpc::keyword("times", 1),
                               rpc::keyword("text", "a")),
             2);
      EXPECT_EQ(agent.sync_script<int>("math.nothing_given", to), 7);
      agent.sync_script<void>("math.nothing", to);
    }
  });
}

TEST_P(Script, AllModesGiveTheLocalResult) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto x = at::rand({2, 2});
    torch::jit::Stack stack{x, "abc"};
    const auto here =
        scripts::exposed().functions->get_function(c10::QualifiedName("mixed"))(stack).toTensor();
    for (const auto& to : {harness::after(agent, 1), agent.self()}) {
      EXPECT_TRUE(at::equal(agent.sync_script("math.mixed", to, x, "abc"), here));
      EXPECT_TRUE(at::equal(agent.async_script("math.mixed", to, x, "abc").get(), here));
      const RRef<at::Tensor> there = agent.remote_script("math.mixed", to, x, "abc");
      EXPECT_EQ(there.owner(), to);
      EXPECT_TRUE(at::allclose(there.sync<&scripts::sum_with>(1.0), here.sum() + 1));
      EXPECT_TRUE(at::equal(there.to_here(), here));
      EXPECT_EQ(agent.remote_script<int>("math.nothing_given", to).to_here(), 7);
    }
  });
}

TEST_P(Script, ReturnsTuplesListsAndDictionaries) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = harness::after(agent, 1);
    const auto one = at::ones({2});
    using All = std::tuple<at::Tensor, int, double, bool, std::string, std::optional<int>>;
    const auto [tensor, number, real, flag, text, none] =
        agent.sync_script<All>("math.all_sorts", to, one, 41, 1.5, false, std::string("text"));
    EXPECT_TRUE(at::equal(tensor, one + 1));
    EXPECT_EQ(number, 42);
    EXPECT_EQ(real, 3.0);
    EXPECT_TRUE(flag);
    EXPECT_EQ(text, "text!");
    EXPECT_FALSE(none.has_value());
    const std::vector<std::string> names{"a", "bc"};
    const auto named =
        agent.sync_script<std::map<std::string, at::Tensor>>("math.named", to, names, one);
    ASSERT_EQ(named.size(), 2U);
    EXPECT_TRUE(at::equal(named.at("bc"), one * 2));
    const std::map<std::string, int> pairs{{"x", 10}, {"y", 20}};
    EXPECT_EQ(agent.sync_script<double>("math.summed", to, std::vector<int>{1, 2}, pairs,
                                        std::pair(100, "ab")),
              135.0);
    EXPECT_EQ(agent.sync_script<double>("math.summed", to, std::vector<double>{}, pairs,
                                        std::tuple(100, "ab"),
                                        rpc::keyword("maybe", std::vector<std::int64_t>{1000})),
              1132.0);
    const std::vector<std::int64_t> whole{1, 2};
    EXPECT_EQ(
        agent.sync_script<double>("math.summed", to, whole, pairs, std::tuple(0, ""), std::nullopt),
        33.0);
    EXPECT_EQ(agent.sync_script<std::vector<int>>("math.counted", to, 3),
              (std::vector<int>{0, 1, 2}));
    using Joined = std::pair<std::string, std::optional<at::Tensor>>;
    using Parts = std::vector<std::pair<std::string, at::Tensor>>;
    const auto joined = agent.sync_script<Joined>("math.joined", to, Parts{{"a", one}, {"b", one}});
    EXPECT_EQ(joined.first, "ab");
    EXPECT_TRUE(at::equal(joined.second.value(), one * 2));
    EXPECT_FALSE(agent.sync_script<Joined>("math.joined", to, Parts()).second.has_value());
    EXPECT_FALSE(agent.sync_script<Joined>("math.joined", to, Parts{{"a", at::Tensor()}})
                     .second.value()
                     .defined());
    const auto anything = agent.sync_script<rpc::ScriptValue>("math.counted", to, 3);
    EXPECT_EQ(std::get<std::vector<rpc::ScriptValue>>(anything.value).size(), 3U);
  });
}

TEST_P(Script, ExposedModulesMethodsAreCalled) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = harness::after(agent, 1);
    const auto x = at::ones({2}, at::kDouble);
    EXPECT_TRUE(at::equal(agent.sync_script("net.forward", to, x), x * 3));
    EXPECT_TRUE(
        at::equal(agent.sync_script("net.forward", to, x, rpc::keyword("shift", 1)), x * 4));
    EXPECT_EQ(agent.sync_script<double>("net.weight_of", to), 3.0);
  });
}

TEST_P(Script, ModuleLivesBehindAReference) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto x = at::ones({2}, at::kDouble);
    for (const auto& to : {harness::after(agent, 1), agent.self()}) {
      const RRef<Module> net = agent.remote<&scripts::make_net>(to, 5.0);
      EXPECT_TRUE(at::equal(
          net.sync<&rpc::run_method<at::Tensor>>("forward", rpc::script_arguments(x)), x * 5));
      const RRef<at::Tensor> stays = net.remote<&rpc::run_method<at::Tensor>>(
          "forward", rpc::script_arguments(x, rpc::keyword("shift", 2)));
      EXPECT_TRUE(at::equal(stays.to_here(), x * 7));
      const auto text =
          text_of([&] { net.sync<&rpc::run_method<double>>("forwards", rpc::ScriptArguments()); });
      expect_in("Net has no method 'forwards'", text);
      expect_in("it has: forward, weight_of", text);
    }
  });
}

TEST_P(Script, UnknownNameListsWhatIsExposed) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto* name : {"math.none", "mathematics.cube", "cube", "math", ".cube", "math.", "",
                             "net.forward.forward"}) {
      const auto text =
          text_of([&] { agent.sync_script(name, harness::after(agent, 1), at::ones({1})); });
      expect_in("no script is exposed here as '" + std::string(name) + "'", text);
      expect_in("math.mixed, math.nothing_given", text);
      expect_in("net.forward", text);
    }
  });
}

TEST_P(Script, WrongArgumentsShowTheSignature) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = harness::after(agent, 1);
    const auto one = at::ones({1});
    const std::map<std::string, int> pairs;
    const std::vector<std::pair<std::function<void()>, std::string>> wrong{
        {[&] { agent.sync_script("math.mixed", to, one); }, "missing value for argument 'text'"},
        {[&] { agent.sync_script("math.mixed", to, one, 1); },
         "Expected a value of type 'str' for argument 'text'"},
        {[&] { agent.sync_script("math.mixed", to, one, "a", 1.5); },
         "Expected a value of type 'int' for argument 'times'"},
        {[&] { agent.sync_script("math.mixed", to, one, "a", 1, 1, 1); },
         "Expected at most 4 argument(s)"},
        {[&] { agent.sync_script("math.mixed", to, one, "a", rpc::keyword("text", "b")); },
         "argument 'text' is given twice, by position and by keyword"},
        {[&] { agent.sync_script("math.mixed", to, one, "a", 1, rpc::keyword("times", 2)); },
         "argument 'times' is given twice, by position and by keyword"},
        {[&] { agent.sync_script("math.mixed", to, one, "a", rpc::keyword("tines", 2)); }, "tines"},
        {[&] { agent.sync_script("math.mixed", to, std::vector<std::string>{"a"}, "a"); },
         "a list of 1 is given where"},
        {[&] { agent.sync_script("math.named", to, std::vector<bool>{true}, one); },
         "it holds a bool where a str is"},
        {[&] {
           agent.sync_script("math.summed", to, std::vector<double>{}, std::vector<bool>{true},
                             std::tuple(1, ""));
         },
         "a Dict is a list of pairs"},
        {[&] {
           agent.sync_script("math.summed", to, std::vector<double>{}, pairs, std::tuple(1, "", 3));
         },
         "a list of 3 is given where"},
        {[&] {
           agent.sync_script("math.summed", to, std::vector<double>{}, pairs, std::tuple(1, 2));
         },
         "it holds a int where a str is"}};
    for (const auto& [call, part] : wrong) {
      const auto text = text_of(call);
      expect_in(part, text);
      expect_in(" does not take these arguments: it is ", text);
      EXPECT_EQ(text.find("C++ CapturedTraceback"), std::string::npos) << text;
    }
    expect_in("mixed(Tensor x, str text, int times=2, float by=1.", text_of(wrong[0].first));
    const auto twice = [&] {
      agent.sync_script("math.mixed", to, rpc::keyword("text", "a"), rpc::keyword("text", "b"));
    };
    EXPECT_EQ(error_of(twice).blame(), Blame::Caller);
    expect_in("the keyword argument 'text' is given twice", error_of(twice).text());
    EXPECT_EQ(agent.sync_script<int>("math.nothing_given", to), 7) << "the callee must still serve";
  });
}

TEST_P(Script, WrongResultTypeNamesBoth) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = harness::after(agent, 1);
    const auto one = at::ones({1});
    expect_in("math.cube returns a Tensor, but a double is asked for",
              text_of([&] { agent.sync_script<double>("math.cube", to, one); }));
    expect_in("math.nothing_given returns a int, but a bool is asked for",
              text_of([&] { agent.sync_script<bool>("math.nothing_given", to); }));
    expect_in("math.nothing returns a NoneType, but a at::Tensor is asked for",
              text_of([&] { agent.remote_script("math.nothing", to).to_here(); }));
    expect_in(
        "returns a Tuple[Tensor, int, float, bool, str, NoneType], but a std::tuple<at::Tensor, "
        "int>",
        text_of([&] {
          agent.sync_script<std::tuple<at::Tensor, int>>("math.all_sorts", to, one, 1, 1.0, true,
                                                         "");
        }));
    agent.sync_script<void>("math.cube", to, one);  // the result is dropped
    // The numbers are too large for the type asked for.
    expect_in("asked for", text_of([&] {
                agent.sync_script<std::vector<std::int8_t>>("math.counted", to, 1000);
              }));
  });
}

TEST_P(Script, ErrorsArriveWithTheirTrace) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = harness::after(agent, 1);
    const auto one = at::ones({1});
    for (const auto& text :
         {text_of([&] { agent.sync_script("math.raises", to, one); }),
          text_of([&] { agent.sync_script("math.raises", agent.self(), one); }),
          text_of([&] { agent.remote_script("math.raises", to, one).to_here(); })}) {
      expect_in("ValueError: too few", text);
      expect_in("Traceback of TorchScript", text);
      expect_in("raise ValueError", text);
    }
    EXPECT_TRUE(at::equal(agent.sync_script("math.cube", to, one), one))
        << "the callee must still serve";
  });
}

// Errors that either end makes, and the calls that both record, name the script and not run_script.
TEST_P(Script, IsShownByItsName) {
  std::map<std::string, std::regex>
      served;  // made before the threads: libstdc++ writes to their common locale
  for (const std::string name : {"math.raises", "aten::add", "absent"}) {
    served[name] = std::regex("\\{[^{}]*\"served\"[^{}]*\"" + name + "\"");
  }
  run_workers(GetParam(), [&served](rpc::Agent& agent) {
    const auto one = at::ones({1});
    for (const auto& to : {harness::after(agent, 1), agent.self()}) {
      const auto function_of = [](const auto& call) -> std::string {
        try {
          call();
        } catch (const rpc::RemoteError& error) {
          return error.function();
        }
        return "";
      };
      EXPECT_EQ(function_of([&] { agent.sync_script("math.raises", to, one); }), "math.raises");
      EXPECT_EQ(function_of([&] { agent.sync_script<void>("net.nothing_such", to); }),
                "net.nothing_such");
      EXPECT_EQ(function_of([&] {
                  agent.sync_op("aten::add", to, one, at::ones({2, 3, 4}).to_sparse());
                }),
                "aten::add");
      const auto made = text_of([&] { agent.remote_script("math.raises", to, one).to_here(); });
      expect_in("math.raises on " + to.name + " threw", made);
      const auto net = agent.remote<&scripts::make_net>(to, 5.0);
      EXPECT_EQ(function_of([&] {
                  net.sync<&rpc::run_method<at::Tensor>>("absent", rpc::ScriptArguments());
                }),
                "absent");
      // A text that is not a name is not shown as one.
      EXPECT_NE(
          function_of([&] { agent.sync_script<void>("a name\nof lines", to); }).find("run_script"),
          std::string::npos);
    }
    for (const auto& [name, text] : served) {  // the other worker's calls may be on their way
      EXPECT_TRUE(harness::comes_true([&] { return std::regex_search(agent.dump(), text); }))
          << name;
    }
  });
}

TEST_P(Script, GradientsFlowThroughIt) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (int i = 0; i < 6; ++i) {  // TorchScript compiles a function again after some runs
      for (const auto& to : {harness::after(agent, 1), agent.self()}) {
        AutogradContext context(agent);
        const auto x = at::full({2}, 2.0, at::kDouble).requires_grad_();
        const auto cubed = agent.remote_script("math.cube", to, x).to_here();
        context.backward({agent.sync_script("net.forward", to, cubed).sum()});
        EXPECT_TRUE(at::allclose(context.gradient(x), at::full({2}, 3.0 * 3 * 2 * 2, at::kDouble)));
        const auto weight = agent.sync<&scripts::gradient_of_weight>(to);
        EXPECT_TRUE(at::allclose(weight, at::full({1}, 16.0, at::kDouble))) << weight;
      }
    }
  });
}

TEST_P(Script, ManyThreadsCallOneModule) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&agent, t] {
        for (int i = 0; i < 25; ++i) {
          const auto to = harness::after(agent, i % 2);
          const auto x = at::full({i % 5 + 1}, t, at::kDouble);
          EXPECT_TRUE(at::equal(agent.sync_script("net.forward", to, x, i), x * 3 + i));
          EXPECT_TRUE(at::equal(agent.sync_script("math.cube", to, x), x * x * x));
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, Script, testing::ValuesIn(harness::settings({2})), harness::name_of);

// libtorch runs the functions that a script forks on its own threads, which forked processes lack.
TEST(ScriptFutures, HoldNoThreadUntilTheyAreDone) {
  scripts::exposed();
  scripts::open(false);
  run_workers({As::Threads, "inproc", 2},
              [](rpc::Agent& agent) {
                if (agent.self().rank != 0) return;
                const auto one = at::ones({2});
                for (const auto& to : {agent.worker(1), agent.self()}) {
                  scripts::open(false);
                  const auto later = agent.async_script("math.later", to, one);
                  EXPECT_EQ(agent.sync<&scripts::plus>(to, 1, 2), 3) << "the only thread is free";
                  EXPECT_FALSE(later.done());
                  scripts::open(true);
                  EXPECT_TRUE(at::equal(later.get(), one + 1));
                  scripts::open(false);
                  const auto awaits = agent.remote_script("math.awaits", to, one);
                  EXPECT_EQ(agent.sync<&scripts::plus>(to, 1, 2), 3);
                  EXPECT_FALSE(awaits.created().done());
                  scripts::open(true);
                  EXPECT_TRUE(at::equal(awaits.to_here(), (one + 1) * 10));
                  expect_in("ValueError: too few",
                            text_of([&] { agent.sync_script("math.fails_later", to, one); }));
                  expect_in("math.later returns a Tensor, but a int is asked for",
                            text_of([&] { agent.sync_script<int>("math.later", to, one); }));
                }
              },
              {.worker_threads = 1});
}

TEST(ScriptFutures, CarryGradients) {
  scripts::exposed();
  scripts::open(true);
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    AutogradContext context(agent);
    const auto x = at::full({2}, 2.0, at::kDouble).requires_grad_();
    context.backward({agent.sync_script("math.awaits", harness::after(agent, 1), x).sum()});
    EXPECT_TRUE(at::allclose(context.gradient(x), at::full({2}, 10.0, at::kDouble)));
  });
}

TEST(ExposeScript, NamesMustBeUnique) {
  const auto& all = scripts::exposed();
  rpc::expose_script("math", all.functions);  // exposes the same again
  rpc::expose_script("net", Module(all.net));
  for (const auto& again :
       {std::function<void()>([&] { rpc::expose_script("math", all.net); }),
        std::function<void()>([] { rpc::expose_script("net", scripts::make_net(1)); }),
        std::function<void()>(
            [] { rpc::expose_script("math", torch::jit::compile("def f():\n  return 1\n")); })}) {
    EXPECT_EQ(error_of(again).blame(), Blame::Caller);
    expect_in("already; give these another name", error_of(again).text());
  }
  for (const auto* name : {"", "a.b", "."}) {
    EXPECT_EQ(error_of([&] { rpc::expose_script(name, all.functions); }).blame(), Blame::Caller);
  }
  EXPECT_EQ(error_of([] { rpc::expose_script("null", nullptr); }).blame(), Blame::Caller);
}

}  // namespace
}  // namespace weft
