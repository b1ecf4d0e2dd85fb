"""A seccomp filter for Linux that takes network, other processes and writing files from a process.

The kernel asks the filter at each system call; it needs no privilege and no namespaces, so that it also works in a
container (kernel.org: Documentation/userspace-api/seccomp_filter.rst). It is a program of classic BPF, as bytes.
"""

import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _NOT_PERMITTED, _NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_THREAD = 0x00010000  # of clone: a thread of the same process
_WRITES = 0o1103  # of open: for writing, creating or emptying
_OTHER_ABI = 0x40000000  # x86-64 has a second table of calls from here on

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Call -> its number on x86-64 and on aarch64; -1 where there is none.
_CALLS = {
    # network
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "io_uring_setup": (425, 425),
    # other processes and programs; clone is looked at more closely
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157),
    "setpgid": (109, 154), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "setpriority": (141, 140), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "setrlimit": (160, 164),
    # files; open and openat are looked at more closely
    "creat": (85, -1), "truncate": (76, 45), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35),
    "link": (86, -1), "linkat": (265, 37), "symlink": (88, -1), "symlinkat": (266, 36), "mknod": (133, -1),
    "mknodat": (259, 33), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "memfd_create": (319, 279),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60),
    # the machine
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "iopl": (172, -1), "ioperm": (173, -1),
}  # fmt: skip
_CLONE, _OPEN, _OPENAT, _PRLIMIT = (56, 220), (2, -1), (257, 56), (302, 261)
_ABSENT = (
    (435, 435),
    (437, 437),
)  # clone3, openat2: their flags lie in memory; the C library falls back to the older calls


def rules() -> bytes:
    """Returns the filter for this machine, 8 bytes an instruction; b"" if the machine is neither x86-64 nor aarch64."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return b""
    arch, column = _MACHINES[platform.machine()]
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), _returns(_KILL), (_LOAD, 0, 0, _NUMBER)]
    program += [(_AT_LEAST, 0, 1, _OTHER_ABI), _returns(_NOT_PERMITTED)]
    for numbers, answer in [(n, _NOT_PERMITTED) for n in _CALLS.values()] + [(n, _NO_SUCH_CALL) for n in _ABSENT]:
        if numbers[column] >= 0:
            program += [(_EQUAL, 0, 1, numbers[column]), _returns(answer)]
    for numbers, argument, bits in ((_OPEN, 1, _WRITES), (_OPENAT, 2, _WRITES)):
        if numbers[column] >= 0:
            program += _refused_if(numbers[column], [8 * argument], bits)
    program += _refused_if(_PRLIMIT[column], [16, 20], 0xFFFFFFFF)  # new limits are given: the pointer is not null
    program += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 1, 0, _THREAD),
        _returns(_NOT_PERMITTED),
        _returns(_ALLOW),
        _returns(_ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _refused_if(number: int, offsets: list[int], bits: int) -> list[tuple[int, int, int, int]]:
    """Returns the instructions that refuse a call if any of `bits` is set in the words at these offsets."""
    words = [
        x for o in offsets for x in ((_LOAD, 0, 0, _ARGUMENTS + o), (_ANY_BIT, 0, 1, bits), _returns(_NOT_PERMITTED))
    ]
    return [(_EQUAL, 0, len(words) + 1, number), *words, _returns(_ALLOW)]


def _returns(answer: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, answer
