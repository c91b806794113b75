# shellcheck shell=bash
# Turn `--name value` on the command line into shell variables. Sourced, not run:
#
#     stage=1           # an option is a variable that the script sets at the start of a line
#     . utils/parse_options.sh
#
# Names may be written with dashes or underscores. The value is always the next argument, as it
# is, so that an empty one and one that starts with dashes are fine. An option whose default is
# true or false takes nothing else. --help prints ${help_message}. What is left after the
# options stays in "$@" for the script to judge.

_option_error() {
    echo "$0: Error: $1 (see $0 --help)" >&2
    exit 2
}

# True if the calling script itself sets a variable of this name, so that variables of the
# environment are no options.
_is_option() {
    [[ $1 =~ ^[a-z][a-z0-9_]*$ ]] && [ "$1" != help_message ] \
        && [ -n "${!1+set}" ] && grep -q "^$1=" "$0"
}

while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h)
            printf '%s\n' "${help_message:-$0: there is no help for this script}"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        --*=*)
            _option_error "write '${1%%=*} ${1#*=}' in place of '$1'"
            ;;
        --*)
            _name=${1#--}
            _name=${_name//-/_}
            if ! _is_option "${_name}"; then
                _option_error "unknown option $1"
            fi
            if [ $# -lt 2 ]; then
                _option_error "option $1 needs a value"
            fi
            case "${!_name}" in
                true | false)
                    if [ "$2" != true ] && [ "$2" != false ]; then
                        _option_error "option $1 must be true or false, but got '$2'"
                    fi
                    ;;
            esac
            printf -v "${_name}" '%s' "$2"
            shift 2
            ;;
        -?*)
            _option_error "unknown option $1"
            ;;
        *)
            break
            ;;
    esac
done
unset _name
