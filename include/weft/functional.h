// Collectives that autograd differentiates through: weft::functional::all_reduce and others.
#pragma once

#include <weft/engine/group/functional.h>
#include <weft/group.h>
