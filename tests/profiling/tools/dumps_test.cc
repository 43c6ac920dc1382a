// SPDX-License-Identifier: Apache-2.0
// Genuine dumps, of one job and of two, whole and damaged.
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/profiling/tools/analysis.h>
#include <weft/profiling/tools/remarks.h>
#include <weft/profiling/tools/wording.h>
#include <weft/profiling/trace/breakage.h>
#include <weft/profiling/trace/called_by.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/transports.h>
#include <weft/tests/harness/folder.h>

namespace weft::tools {
namespace {

using Json = nlohmann::json;
using testing::EndsWith;
using testing::HasSubstr;
using trace::Kind;
using trace::Member;
using trace::MemberIdentity;
using trace::Operation;

constexpr int kNoNamespace = 77;

std::vector<int> ranks_to(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

MemberIdentity in_group(int rank, int size) { return {"group", "default", rank, ranks_to(size)}; }
MemberIdentity agent(int rank) { return {"agent", "worker" + std::to_string(rank), rank, {}}; }

// Records operations of each kind: ended, failed and under way.
void work(const Member& member) {
  const std::int64_t shape[] = {2, 2};
  const int other = 1 - member.party()->rank;
  if (member.party()->kind == "agent") {
    Operation::begin(member, Kind::Call, {.name = "work::slowly", .sequence = 7, .peer = other});
    Operation::begin(member, Kind::Served, {.name = "work::slowly", .sequence = 7, .peer = other});
    return;
  }
  Operation::begin(member, Kind::Collective, {.name = "barrier", .sequence = 1}).end();
  const trace::About reduce{.name = "reduce",
                            .sequence = 2,
                            .peer = 1,
                            .bytes = 16,
                            .dtype = "float32",
                            .shape = shape,
                            .reduction = "Max"};
  Operation::begin(member, Kind::Collective, reduce).fail(Error(Blame::Timeout, "too \"late\""));
  Operation::begin(
      member, Kind::Collective,
      {.name = "all_reduce", .sequence = 3, .bytes = 16, .dtype = "float32", .shape = shape});
  Operation::begin(member, Kind::Receive,
                   {.name = "recv", .sequence = 1, .peer = other, .tag = 3, .bytes = 16});
}

void run_collectives(const Member& member, std::uint64_t begun, std::uint64_t ended) {
  for (std::uint64_t i = 1; i <= begun; ++i) {
    Operation one = Operation::begin(member, Kind::Collective, {.name = "barrier", .sequence = i});
    if (i <= ended) one.end();
  }
}

class DumpFiles : public testing::Test {
 protected:
  // Runs `work` in a process and writes its dump to a file of that name. Returns the file's path.
  std::string dump_by(const std::string& name, const std::function<void()>& work) {
    const std::string path = folder_.path() + "/" + name + ".json";
    const pid_t child = ::fork();
    if (child == 0) {
      work();
      std::ofstream(path) << trace::dump("asked");
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    return path;
  }
  // The dump of a process that is each of these parties.
  std::string dump_of(const std::string& name, const std::vector<MemberIdentity>& parties,
                      const std::vector<std::string>& jobs = {}) {
    return dump_by(name, [&] {
      for (const std::string& id : jobs) trace::joined_job(id);
      for (const MemberIdentity& party : parties) work(Member::join(party));
    });
  }
  std::vector<std::string> job(const std::string& name, int size) {
    std::vector<std::string> files;
    for (int rank = 0; rank < size; ++rank)
      files.push_back(dump_of(name + std::to_string(rank), {in_group(rank, size), agent(rank)}));
    return files;
  }

  static std::string error_of(const std::vector<std::string>& files) {
    try {
      read_dumps(files);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      return error.text();
    }
  }

  static std::string read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  // Writes the text to the first file. Reading the files must give findings, or an Error that names
  // the file.
  static void expect_findings_or_its_name(const std::vector<std::string>& files,
                                          const std::string& text) {
    std::ofstream(files.front()) << text;
    try {
      const Dumps dumps = read_dumps(files);
      for (const auto age : {std::chrono::nanoseconds(0), kOlderThan}) {
        analyze(dumps, age);
        remarks(dumps, age);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr(files.front())) << text;
      EXPECT_EQ(error.text().find("json.exception"), std::string::npos) << error.text();
    }
  }

  const harness::Folder folder_;
};

TEST_F(DumpFiles, OfOneJobAreMerged) {
  const Dumps dumps = read_dumps(job("one", 2));
  ASSERT_EQ(dumps.groups.size(), 1u);
  EXPECT_EQ(dumps.groups[0].views.size(), 2u);
  EXPECT_EQ(dumps.agents.size(), 2u);
  const Record& reduce = dumps.groups[0].views.at(1).records.at(1);
  EXPECT_EQ(reduce.error, "too \"late\"");
  EXPECT_EQ(describe(reduce), "collective #2, reduce (Max, root 1) of float32 [2, 2]");
}

// Ranks in two containers of one machine may have the same pid.
TEST_F(DumpFiles, OfSeparatePidNamespacesAreAllKept) {
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t outer = ::fork();
    if (outer == 0) {
      if (::unshare(CLONE_NEWPID) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0)
        ::_exit(kNoNamespace);
      const pid_t child = ::fork();
      if (child == 0) {
        work(Member::join(in_group(rank, 2)));
        trace::dump_to(folder_.path());
        trace::dump_now("asked");
        ::_exit(0);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      ::_exit(status == 0 ? 0 : 1);
    }
    int status = 0;
    ::waitpid(outer, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNoNamespace)
      GTEST_SKIP() << "no PID namespace may be made here";
    ASSERT_EQ(status, 0);
  }
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
    files.push_back(entry.path());
  ASSERT_EQ(files.size(), 2u);
  const Dumps dumps = read_dumps(files);
  EXPECT_EQ(dumps.groups.at(0).views.size(), 2u);
  for (const Dump& dump : dumps.dumps) EXPECT_EQ(dump.pid, 1);
}

TEST_F(DumpFiles, OfEqualPidsAreBothRead) {
  const auto files = job("job", 2);
  for (const std::string& file : files) {
    Json json = Json::parse(read(file));
    json["pid"] = 7;
    std::ofstream(file) << json;
  }
  const Dumps dumps = read_dumps(files);
  EXPECT_EQ(dumps.groups.at(0).views.size(), 2u);
  EXPECT_EQ(dumps.agents.size(), 2u);
}

TEST_F(DumpFiles, OfTwoJobsAreRefused) {
  const auto first = job("first", 3);
  const auto second = job("second", 2);
  const auto groups_only =
      std::vector{dump_of("a0", {in_group(0, 3)}), dump_of("b0", {in_group(0, 2)})};
  for (const auto& files : {std::vector{first[0], first[1], first[2], second[0], second[1]},
                            std::vector{second[1], first[2], second[0], first[1]}, groups_only,
                            std::vector{groups_only[1], groups_only[0]}}) {
    EXPECT_THAT(error_of(files), HasSubstr("these dumps are of two jobs"));
  }
  EXPECT_EQ(error_of(first), "");
  EXPECT_EQ(error_of(second), "");
}

// A server that makes no calls and waits for workers whose agents do not exist yet.
TEST_F(DumpFiles, OfEqualAgentAndRankAreOneJob) {
  const Dumps dumps =
      read_dumps({dump_of("server", {agent(0)}), dump_of("trainer", {in_group(0, 2)})});
  EXPECT_EQ(dumps.agents.at(0).name, "worker0");
  EXPECT_EQ(dumps.groups.at(0).views.size(), 1u);
}

TEST_F(DumpFiles, OfTwoJobsNameTheSharedRank) {
  const std::string first = dump_of("first", {in_group(0, 2)});
  const std::string second = dump_of("second", {in_group(0, 2)});
  const std::string text = error_of({first, dump_of("other", {in_group(1, 2)}), second});
  EXPECT_THAT(text, HasSubstr("both are rank 0 of group 'default'"));
  EXPECT_THAT(text, HasSubstr("'" + first + "'"));
  EXPECT_THAT(text, HasSubstr("'" + second + "'"));
}

TEST_F(DumpFiles, OfTwoJobsAreToldApartByTheirIds) {
  const std::string text =
      error_of({dump_of("a0", {in_group(0, 2)}, {"aa"}), dump_of("b1", {in_group(1, 2)}, {"bb"})});
  EXPECT_THAT(text, HasSubstr("these dumps are of two jobs"));
  EXPECT_THAT(text, HasSubstr("are rank 0 and rank 1 of two groups 'default'"));
  // A rank that joined again shares the newer job; a process that is in no group of several ranks
  // has none.
  EXPECT_EQ(error_of({dump_of("c0", {in_group(0, 2)}, {"aa", "cc"}),
                      dump_of("c1", {in_group(1, 2)}, {"cc"})}),
            "");
  EXPECT_EQ(error_of({dump_of("d0", {in_group(0, 2)}, {"aa"}), dump_of("d1", {in_group(1, 2)})}),
            "");
}

// After a rank was lost, the others make a group of the same name in which they have other ranks.
TEST_F(DumpFiles, OfSurvivorsAreOneJob) {
  const Dumps dumps =
      read_dumps({dump_of("0", {in_group(0, 3), in_group(0, 2)}), dump_of("lost", {in_group(1, 3)}),
                  dump_of("2", {in_group(2, 3), in_group(1, 2)})});
  ASSERT_EQ(dumps.groups.size(), 2u);
  EXPECT_EQ(dumps.groups[0].views.size() + dumps.groups[1].views.size(), 5u);
}

// Both survivors have begun the all_reduce a moment ago, and wrote their dumps as soon as they knew
// of the loss: before any connection of theirs broke, so the all_reduce is open.
TEST_F(DumpFiles, OfABrokenGroupShowThatItsWaitsWereInVain) {
  const auto of_a_survivor = [&](int rank) {
    return dump_by("survivor" + std::to_string(rank), [rank] {
      const Member member = Member::join(in_group(rank, 3));
      run_collectives(member, 2, 1);
      trace::record_breakage(member, Error(Blame::PeerLost, "rank 1 is lost"));
    });
  };
  const std::vector files{of_a_survivor(0), of_a_survivor(2)};
  const Dumps dumps = read_dumps(files);
  const Record& waited = dumps.groups.at(0).views.at(2).records.at(1);
  EXPECT_EQ(waited.state, "failed");
  EXPECT_EQ(waited.blame + ": " + waited.error, "PeerLost: rank 1 is lost");
  EXPECT_EQ(dumps.groups.at(0).views.at(2).records.at(0).state, "done");
  const auto found = analyze(dumps);
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0].what, Finding::What::MissingRank);
  EXPECT_EQ(found[0].ranks, std::vector{1});
}

TEST_F(DumpFiles, OfABrokenGroupAreNotThoseOfItsSuccessor) {
  const std::string file = dump_by("survivor", [] {
    const Member first = Member::join(in_group(0, 3));
    trace::record_breakage(first, Error(Blame::PeerLost, std::string(1000, 'x')));
    const Member second = Member::join(in_group(0, 3));
    run_collectives(second, 1, 0);
  });
  const Dumps dumps = read_dumps({file});
  EXPECT_EQ(dumps.groups.at(0).views.at(0).records.at(0).state, "open");
}

TEST_F(DumpFiles, TellWhichTransportsAStuckCollectiveUses) {
  const auto of_a_rank = [&](int rank, const std::string& transports) {
    return dump_by("rank" + std::to_string(rank), [&, rank] {
      const Member member = Member::join(in_group(rank, 2));
      trace::record_transports(member, "gloo to rank 7");
      trace::record_transports(member, transports);
      run_collectives(member, 1, 0);
    });
  };
  const std::vector files{of_a_rank(0, "tcp to rank 1"), of_a_rank(1, "tcp to rank 0")};
  const Dumps dumps = read_dumps(files);
  EXPECT_EQ(dumps.groups.at(0).views.at(1).transports, "tcp to rank 0");
  const auto found = analyze(dumps, std::chrono::nanoseconds(0));
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0].what, Finding::What::StuckCollective);
  EXPECT_THAT(found[0].text, EndsWith("; rank 0 uses tcp to rank 1; rank 1 uses tcp to rank 0"));
}

TEST_F(DumpFiles, KeepTheTransportsOfTheLatestGroups) {
  const std::string file = dump_by("rank", [] {
    for (int i = 0; i < 300; ++i)
      trace::record_transports(Member::join(in_group(0, 2)), std::string(1000, 'x'));
    const Member last = Member::join(in_group(0, 3));
    trace::record_transports(last, "shm to ranks 1, 2");
    run_collectives(last, 1, 1);
  });
  const Group last = read_dumps({file}).groups.back();
  EXPECT_EQ(last.ranks.size(), 3u);
  EXPECT_EQ(last.views.at(0).transports, "shm to ranks 1, 2");
}

// Rank 2 was lost and another process replaced it: the others count the group that they made with
// it as their second.
TEST_F(DumpFiles, OfAReplacementBelongToItsGroup) {
  const auto of_a_survivor = [&](int rank, std::uint64_t collectives) {
    return dump_by("survivor" + std::to_string(rank), [=] {
      trace::joined_job("aa");
      Operation::note(Member::join(in_group(rank, 3)), Kind::Collective,
                      {.name = "barrier", .sequence = 1});
      const Member again = Member::join(in_group(rank, 3));
      trace::joined_job("bb");
      run_collectives(again, collectives, 2);
    });
  };
  const std::string lost = dump_by("lost", [] {
    trace::joined_job("aa");
    Operation::note(Member::join(in_group(2, 3)), Kind::Collective,
                    {.name = "barrier", .sequence = 1});
  });
  const std::string newcomer = dump_by("newcomer", [] {
    const Member member = Member::join(in_group(2, 3));
    trace::joined_job("bb");
    run_collectives(member, 3, 2);
  });
  const std::vector files{of_a_survivor(0, 3), of_a_survivor(1, 2), newcomer};
  std::vector with_the_lost = files;
  with_the_lost.push_back(lost);
  for (const auto& each : {files, with_the_lost}) {
    const Dumps dumps = read_dumps(each);
    ASSERT_EQ(dumps.groups.size(), 2u);
    for (const Group& group : dumps.groups)
      EXPECT_EQ(group.views.size(), group.generation == 1 || each.size() == 4 ? 3u : 2u)
          << group.generation;
    const auto findings = analyze(dumps, std::chrono::nanoseconds(0));
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].what, Finding::What::LateRank);
    EXPECT_THAT(findings[0].ranks, testing::ElementsAre(1));
  }
}

// One survivor has begun to make the group again, the other has not.
TEST_F(DumpFiles, OfOneJobKeepTheirGenerations) {
  std::vector<std::string> files;
  for (const int rank : {0, 1}) {
    files.push_back(dump_by("survivor" + std::to_string(rank), [=] {
      trace::joined_job("aa");
      Operation::note(Member::join(in_group(rank, 2)), Kind::Collective,
                      {.name = "barrier", .sequence = 1});
      trace::joined_job("bb");
      if (rank == 0) run_collectives(Member::join(in_group(rank, 2)), 1, 0);
    }));
  }
  const Dumps dumps = read_dumps(files);
  ASSERT_EQ(dumps.groups.size(), 2u);
  EXPECT_EQ(dumps.groups[0].views.size() + dumps.groups[1].views.size(), 3u);
  const auto findings = analyze(dumps, std::chrono::nanoseconds(0));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(
      findings[0].text,
      HasSubstr(
          "rank 1 is missing: its dump shows it in an older or newer group of that name only"));
}

TEST_F(DumpFiles, OfARankOutsideItsGroupAreDamaged) {
  const auto files = job("job", 2);
  const Json genuine = Json::parse(read(files[1]));
  for (const char* ranks : {"[]", "[0]", "[0,0]", "[0,-1]", "[0,1.5]", "[0,4294967297]", "7"}) {
    Json damaged = genuine;
    for (Json& party : damaged["parties"]) {
      if (party["kind"] == "group") party["ranks"] = Json::parse(ranks);
    }
    std::ofstream(files[1]) << damaged;
    EXPECT_THAT(error_of(files), HasSubstr("'" + files[1] + "' is damaged: ")) << ranks;
  }
}

TEST_F(DumpFiles, NameWhatCalledAnOperation) {
  const Dumps dumps = read_dumps({dump_by("called", [] {
    const trace::CalledBy by("the unit \"a\"");
    run_collectives(Member::join(in_group(0, 2)), 1, 0);
  })});
  const Record& record = dumps.groups.at(0).views.at(0).records.at(0);
  EXPECT_EQ(record.called_by, "the unit \"a\"");
  EXPECT_EQ(describe(record), "collective #1, barrier for the unit \"a\"");
}

TEST_F(DumpFiles, ThatAreTruncatedSaySo) {
  const std::string file = dump_of("cut", {in_group(0, 2)});
  const std::string whole = read(file);
  for (std::size_t bytes = 40; bytes + 2 < whole.size(); bytes += 3) {
    std::ofstream(file) << whole.substr(0, bytes);
    EXPECT_THAT(error_of({file}), HasSubstr("cut.json' ends in the middle, after " +
                                            std::to_string(bytes) + " bytes"));
  }
}

// The ring keeps open operations, so the oldest record does not show since when the recorder has
// kept all.
TEST_F(DumpFiles, HoldTheLastAndAllOpenOperations) {
  const auto of_calls = [&](std::size_t calls) {
    return read_dumps({dump_by("calls", [=] {
      Operation::begin(Member::join(agent(1)), Kind::Served,
                       {.name = "hangs", .sequence = 1, .peer = 0});
      const Member member = Member::join(in_group(1, 2));
      for (std::size_t i = 0; i < calls; ++i)
        Operation::note(member, Kind::Collective, {.name = "barrier", .sequence = i + 1});
    })});
  };
  EXPECT_EQ(of_calls(trace::kRecords - 1).dumps[0].knows_since, 0);
  const Dumps dumps = of_calls(trace::kRecords + 100);
  EXPECT_EQ(dumps.agents.at(1).records.at(0).state, "open");
  const auto& records = dumps.groups[0].views.at(1).records;
  ASSERT_EQ(records.size(), trace::kRecords - 1);
  EXPECT_EQ(dumps.dumps[0].knows_since, records[0].begun);
}

void add_places(const Json& json, const Json::json_pointer& at,
                std::vector<Json::json_pointer>& places) {
  places.push_back(at);
  if (!json.is_structured()) return;
  for (const auto& [key, value] : json.items()) {
    add_places(value, json.is_array() ? at / std::stoul(key) : at / key, places);
  }
}

TEST_F(DumpFiles, WithAReplacedFieldAreReadOrRefused) {
  const auto files = job("job", 2);
  const Json genuine = Json::parse(read(files[0]));
  std::vector<Json::json_pointer> places;
  for (const auto& [key, value] : genuine.items())
    add_places(value, Json::json_pointer() / key, places);
  ASSERT_GT(places.size(), 100u);
  for (const auto& place : places) {
    for (const char* value : {"null", "true", "-1", "0", "1", "2", "1000000", "4294967296",
                              "9223372036854775807", "18446744073709551615", "-9223372036854775808",
                              "1e300", "\"\"", "\"open\"", "\"collective\"", "[]", "[0]", "{}"}) {
      Json damaged = genuine;
      damaged[place] = Json::parse(value);
      expect_findings_or_its_name(files, damaged.dump());
    }
    Json damaged = genuine;
    Json& parent = damaged[place.parent_pointer()];
    if (parent.is_object()) parent.erase(place.back());
    expect_findings_or_its_name(files, damaged.dump());
  }
}

TEST_F(DumpFiles, WithReplacedBytesAreReadOrRefused) {
  const auto files = job("job", 2);
  const std::string whole = read(files[0]);
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string damaged = whole;
    for (int i = 0; i <= round % 3; ++i)
      damaged[random() % damaged.size()] = static_cast<char>(random());
    expect_findings_or_its_name(files, damaged);
  }
}

}  // namespace
}  // namespace weft::tools
