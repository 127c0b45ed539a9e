/* What the tests of `aether launch` run inside a sandbox: reports what it sees, attacks what it must
 * not reach. One line per answer, "name value"; for an attempt the value is 0 or an errno's name. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static void say(const char *name, long answer) {
    printf("%s %s\n", name, answer == -1 ? strerrorname_np(errno) : "0");
}

static int open_it(const char *path, int flags) { return open(path, flags | O_CLOEXEC); }

/* The signal that ends a child which makes this 32-bit call (getpid), or 0. */
static int int80(void) {
    pid_t child = fork();
    if (child == 0) {
        long answer;
        __asm__ volatile("int $0x80" : "=a"(answer) : "a"(20) : "memory", "r8", "r9", "r10", "r11");
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void attack(void) {
    char buffer[64];
    struct iovec here = {buffer, sizeof buffer}, there = {(void *)0x400000, sizeof buffer};
    struct rlimit64 limit = {1, 1};
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(0, &cpus);

    say("mount", mount("none", "/tmp", "tmpfs", 0, NULL));
    say("umount", umount2("/proc/keys", MNT_DETACH));
    say("remount", mount(NULL, "/sys", NULL, MS_REMOUNT | MS_BIND, NULL));
    say("fsopen", syscall(SYS_fsopen, "tmpfs", 0));
    say("open_tree", syscall(SYS_open_tree, AT_FDCWD, "/", 1));
    say("pivot_root", syscall(SYS_pivot_root, ".", "."));
    say("unshare_user", unshare(CLONE_NEWUSER));
    say("unshare_mount", unshare(CLONE_NEWNS));
    say("unshare_files", unshare(CLONE_FILES));
    say("clone_user", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
    say("clone3", syscall(SYS_clone3, NULL, 0));
    say("setns", setns(open_it("/proc/self/ns/net", O_RDONLY), 0));

    say("ptrace_1", ptrace(PTRACE_SEIZE, 1, 0, 0));
    say("fds_of_1", open_it("/proc/1/fd", O_RDONLY | O_DIRECTORY));
    say("memory_of_1", open_it("/proc/1/mem", O_RDWR));
    say("maps_of_1", open_it("/proc/1/maps", O_RDONLY));
    say("environ_of_1", open_it("/proc/1/environ", O_RDONLY));
    say("root_of_1", open_it("/proc/1/root", O_RDONLY));
    say("exe_of_1", open_it("/proc/1/exe", O_RDONLY));
    say("read_1", syscall(SYS_process_vm_readv, 1, &here, 1, &there, 1, 0));
    say("getfd_1", syscall(SYS_pidfd_getfd, syscall(SYS_pidfd_open, 1, 0), 0, 0));
    say("renice_1", setpriority(PRIO_PROCESS, 1, 19));
    say("affinity_1", sched_setaffinity(1, sizeof cpus, &cpus));
    say("limit_1", syscall(SYS_prlimit64, 1, RLIMIT_NOFILE, &limit, NULL));
    say("oom_1", open_it("/proc/1/oom_score_adj", O_WRONLY));
    say("cgroup_1", open_it("/sys/fs/cgroup/cgroup.procs", O_WRONLY));

    say("bpf", syscall(SYS_bpf, 0, NULL, 0));
    say("keyctl", syscall(SYS_keyctl, 0, 0));
    say("userfaultfd", syscall(SYS_userfaultfd, 0));
    say("io_uring", syscall(SYS_io_uring_setup, 1, buffer));
    say("perf", syscall(SYS_perf_event_open, buffer, 0, -1, -1, 0));
    say("by_handle", syscall(SYS_open_by_handle_at, AT_FDCWD, buffer, 0));
    say("vsock", socket(40, SOCK_STREAM, 0));
    say("alg", socket(AF_ALG, SOCK_SEQPACKET, 0));
    say("unix", socket(AF_UNIX, SOCK_STREAM, 0));
    say("tiocsti", ioctl(0, TIOCSTI, "x"));
    say("tiocsti_high", syscall(SYS_ioctl, 0, 0xdead00000000UL | TIOCSTI, "x"));
    say("x32", syscall(0x40000000 | SYS_getpid));
    printf("int80 %d\n", int80());

    say("core_pattern", open_it("/proc/sys/kernel/core_pattern", O_WRONLY));
    say("sysrq", open_it("/proc/sysrq-trigger", O_WRONLY));
    say("more_namespaces", open_it("/proc/sys/user/max_user_namespaces", O_WRONLY));
    say("device", mknod("/tmp/disk", S_IFBLK | 0600, makedev(254, 0)));
    say("new_in_dev", open_it("/dev/new", O_RDWR | O_CREAT));
    say("hostname", sethostname("mine", 4));
    say("kcore", read(open_it("/proc/kcore", O_RDONLY), buffer, 1) > 0 ? 0 : (errno = ENODATA, -1));
    /* Last: it would be the end if it worked. */
    say("kill_1", kill(1, SIGKILL));
    say("stop_1", kill(1, SIGSTOP));
}

static void list(const char *path) {
    DIR *directory = opendir(path);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        char link[256] = "";
        if (entry->d_name[0] == '.' || atoi(entry->d_name) == dirfd(directory)) {
            continue;
        }
        if (readlinkat(dirfd(directory), entry->d_name, link, sizeof link - 1) < 0) {
            strcpy(link, "-");
        }
        printf("%s %s\n", entry->d_name, link);
    }
}

static void status_of(const char *path) {
    struct stat about;
    if (lstat(path, &about)) {
        say(path, -1);
        return;
    }
    printf("%s %u:%u:%o\n", path, about.st_uid, about.st_gid, about.st_mode & 07777);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    const char *path = argc > 2 ? argv[2] : "";
    setvbuf(stdout, NULL, _IONBF, 0);
    if (!strcmp(what, "attack")) {
        attack();
    } else if (!strcmp(what, "list")) {
        list(path);
    } else if (!strcmp(what, "stat")) {
        for (int at = 2; at < argc; at++) {
            status_of(argv[at]);
        }
    } else if (!strcmp(what, "ids")) {
        printf("uid %u\neuid %u\n", getuid(), geteuid());
    } else if (!strcmp(what, "cat")) {
        char buffer[65536];
        ssize_t got;
        int file = open_it(path, O_RDONLY);
        say("open", file);
        while ((got = read(file, buffer, sizeof buffer)) > 0) {
            fwrite(buffer, 1, got, stdout);
        }
    } else if (!strcmp(what, "write") && argc > 3) {
        int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
        say("write", file < 0 ? -1 : write(file, argv[3], strlen(argv[3])));
    } else if (!strcmp(what, "chown") && argc > 3) {
        say("chown", chown(path, atoi(argv[3]), atoi(argv[3])));
    } else if (!strcmp(what, "setuid")) {
        uid_t id = atoi(path);
        say("setgroups", setgroups(1, &id));
        say("setgid", setgid(id));
        say("setuid", setuid(id));
        printf("uid %u\n", getuid());
    } else if (!strcmp(what, "sleep")) {
        sleep(60);
    } else {
        fprintf(stderr, "probe: what is %s?\n", what);
        return 64;
    }
    return 0;
}
