// SPDX-License-Identifier: Apache-2.0
// weft-debug: reads dumps of the ranks' flight recorders and reports what went wrong on which rank.
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/version.h>
#include <weft/profiling/tools/analysis.h>
#include <weft/profiling/tools/command_line.h>
#include <weft/profiling/tools/duration.h>
#include <weft/profiling/tools/remarks.h>
#include <weft/profiling/tools/wording.h>

namespace weft::tools {
namespace {

constexpr int kFound = 1;  // exit code

struct Options {
  std::vector<std::string> files;
  std::string older_than = "1s";
  bool as_json = false;
};

void print_json(const std::vector<Finding>& findings, const Remarks& beside) {
  nlohmann::ordered_json rows = nlohmann::json::array();
  for (const Finding& finding : findings)
    rows.push_back(
        {{"what", name(finding.what)}, {"ranks", finding.ranks}, {"text", finding.text}});
  const nlohmann::ordered_json all{
      {"findings", rows}, {"running", beside.running}, {"ranks_without_dump", beside.without_dump}};
  std::printf("%s\n", all.dump(2).c_str());
}

void print_text(const Dumps& dumps, const std::vector<Finding>& findings, const Remarks& beside) {
  std::printf("%zu processes, %zu groups, %zu agents\n", dumps.dumps.size(), dumps.groups.size(),
              dumps.agents.size());
  if (!beside.without_dump.empty())
    std::printf("no dump: of %s\n", list_ranks(beside.without_dump).c_str());
  for (const Finding& finding : findings)
    std::printf("%s: %s\n", name(finding.what), finding.text.c_str());
  for (const std::string& one : beside.running) std::printf("running: %s\n", one.c_str());
  if (findings.empty())
    std::printf("nothing is stuck, nothing has failed, and nobody is behind the others\n");
}

// Replaces each folder among the names by the dumps in it.
std::vector<std::string> files_of(const std::vector<std::string>& named) {
  std::vector<std::string> files;
  for (const std::string& name : named) {
    if (!std::filesystem::is_directory(name)) {
      files.push_back(name);
      continue;
    }
    const std::size_t before = files.size();
    for (const auto& entry : std::filesystem::directory_iterator(name)) {
      const std::string file = entry.path().filename();
      if (file.starts_with("dump-") && file.ends_with(".json")) files.push_back(entry.path());
    }
    if (files.size() == before) {
      throw Error(Blame::Caller,
                  "the folder '" + name +
                      "' has no dumps (dump-….json); if weft-run may start the ranks again, each "
                      "round has a folder attempt_N in it: name one of those");
    }
  }
  return files;
}

int analyze_files(const Options& options) {
  const auto older_than = parse_duration("--older-than", options.older_than);
  if (options.files.empty()) {
    throw Error(Blame::Caller,
                "analyze needs the dumps of one job: name the files dump-….json, or their folder "
                "(WEFT_DUMP_DIR, or weft-" +
                    std::to_string(::geteuid()) + " in the folder for temporary files)");
  }
  const Dumps dumps = read_dumps(files_of(options.files));
  const auto findings = analyze(dumps, older_than);
  const Remarks beside = remarks(dumps, older_than);
  options.as_json ? print_json(findings, beside) : print_text(dumps, findings, beside);
  return findings.empty() ? 0 : kFound;
}

}  // namespace
}  // namespace weft::tools

int main(int argc, char** argv) {
  CLI::App app("Says what went wrong in a job, from the dumps of its ranks.", "weft-debug");
  app.set_version_flag("--version", app.get_name() + " " + weft::version());
  app.require_subcommand(1);
  weft::tools::Options options;
  CLI::App* analyze =
      app.add_subcommand("analyze",
                         "Find late and missing ranks, collectives and messages that do not match "
                         "or end, calls without a reply, waits in a circle");
  analyze->add_option("dumps", options.files,
                      "The files that the ranks of one job wrote to WEFT_DUMP_DIR at about one "
                      "moment, or that folder");
  analyze
      ->add_option(
          "--older-than", options.older_than,
          "Count an operation as waiting once it has been open for so long (0, 500ms, 1s, 2min)")
      ->capture_default_str();
  analyze->add_flag("--json", options.as_json, "Print a JSON object");
  app.footer(
      "Exit code: 0 nothing found, 1 something found, 2 the dumps cannot be read or the command "
      "line is wrong");
  return weft::tools::run_program(app, argc, argv,
                                  [&] { return weft::tools::analyze_files(options); });
}
