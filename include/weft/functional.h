// SPDX-License-Identifier: Apache-2.0
// Collectives that autograd differentiates through: weft::functional::all_reduce and others.
#pragma once

#include <weft/engine/group/functional.h>
#include <weft/group.h>
